"""mini-ImageNet with the split of Ravi & Larochelle (2017): 64 / 16 / 20 classes of 600 colour pictures, 84 x 84.

Raw files: train.csv, val.csv and test.csv (columns filename,label) and the pictures they name, in folders or zips of
any nesting; pictures are found by file name. ImageNet's terms allow no public download, so these are handed over.
"""

import csv
import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from fastweights.data.checks import Finding
from fastweights.data.images import ImageSplit, decode_all, opened, save_images
from fastweights.data.prepared import prepared_folder
from fastweights.data.progress import Report, silent
from fastweights.data.sources import Files, write_whole, write_zip
from fastweights.errors import UserError

NAME = "mini-imagenet"
VARIANTS = ("",)
SIZE = 84
CLASSES = {"train": 64, "val": 16, "test": 20}
PER_CLASS = 600
KNOWN = {
    "train": {"d53a9c946a001d4ef31f5275b465c2e12d822735aa086717033cde7dfcf43657": "Ravi & Larochelle's"},
    "val": {"0f9076ec3eea60fb968191a4727d488885c7a80ec31b75426db804b15692b4d5": "Ravi & Larochelle's"},
    "test": {"d53cd6dc834b0e3af6891a6e130e0376fc693f591b116c7f4951531d5e1a49a9": "Ravi & Larochelle's"},
}
"""What SHA-256 over file names, labels and pixels are known for each split, and under what name."""
HOW_TO_GET = (
    "mini-ImageNet has no public download, because ImageNet's terms forbid one. Get train.csv, val.csv and test.csv "
    "from github.com/twitter-research/meta-learning-lstm (folder data/miniImagenet) and the 60,000 pictures they name, "
    "84 x 84 pixels, from your own ILSVRC-2012 copy or from a zipped copy that a colleague has; then run "
    "`fastweights data get mini-imagenet --from FOLDER_OR_ZIP`, with one --from for each place if there are several."
)


@dataclass(frozen=True)
class Listing:
    """What one csv file says: pictures and labels, sorted by label, then by file name."""

    pictures: Sequence[str]
    labels: Sequence[str]


def have_raw(root: Path) -> bool:
    folder = root / NAME
    return all((folder / f"{split}.csv").exists() for split in CLASSES)


def get(root: Path, given: Sequence[Path] = (), progress: Report = silent) -> list[Finding]:
    """Check what was handed over and pack it under the data root as three csv files and one zip."""
    if not given:
        raise UserError(HOW_TO_GET)
    with Files(given) as files:
        listings = read_listings(files)
        places = find_pictures(files, listings)
        findings = _check(files, listings, places, progress)
        names = [name for listing in listings.values() for name in listing.pictures]
        write_zip(root / NAME / "images.zip", ((f"images/{name}", files.read(places[name])) for name in names))
    for split, listing in listings.items():  # last: their presence says that all is there
        rows = zip(listing.pictures, listing.labels, strict=True)
        text = "filename,label\n" + "".join(f"{name},{label}\n" for name, label in rows)
        write_whole(root / NAME / f"{split}.csv", lambda draft, text=text: _write_text(draft, text))  # type: ignore[misc]
    return findings


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def verify(root: Path, progress: Report = silent) -> list[Finding]:
    with Files([root / NAME]) as files:
        listings = read_listings(files)
        return _check(files, listings, find_pictures(files, listings), progress)


def prepare(root: Path, variant: str = "", progress: Report = silent) -> Path:
    """Write the prepared form and return its folder."""
    splits, hashes = {}, {}
    with Files([root / NAME]) as files:
        listings = read_listings(files)
        places = find_pictures(files, listings)
        for split, listing in listings.items():
            pixels = _pixels(files, listing, places, progress, split)
            hashes[split] = _content_hash(listing, pixels)
            sizes = Counter(listing.labels)
            splits[split] = ImageSplit(pixels, list(sizes.values()), list(sizes))
    folder = prepared_folder(root, NAME)
    source = {split: KNOWN[split].get(digest, "unknown") for split, digest in hashes.items()}
    manifest = {"name": NAME, "variant": "", "source_hashes": hashes, "source": source, "size": SIZE}
    save_images(folder, splits, manifest)
    return folder


def read_listings(files: Files) -> dict[str, Listing]:
    """The three csv files, wherever they lie, checked for counts and for classes that stand in two of them."""
    listings = {}
    for split in CLASSES:
        found = [name for name in files.names if name.rsplit("/", 1)[-1].lower() == f"{split}.csv"]
        if len(found) != 1:
            listed = f"found {len(found)}: {', '.join(found)}" if found else "found none"
            raise UserError(f"mini-ImageNet needs one {split}.csv (columns filename,label), but {listed}; {_WHERE}.")
        listings[split] = _read_listing(files.read(found[0]), found[0], split)
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = sorted(set(listings[one].labels) & set(listings[other].labels))
        if shared:
            raise UserError(f"class {shared[0]} is listed in both {one}.csv and {other}.csv; {_WHERE}.")
    return listings


_WHERE = "the original csv files are at github.com/twitter-research/meta-learning-lstm, data/miniImagenet"


def _read_listing(data: bytes, name: str, split: str) -> Listing:
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))
        pairs = sorted((row["label"].strip(), row["filename"].strip()) for row in rows)
    except (UnicodeDecodeError, csv.Error, KeyError, AttributeError):
        raise UserError(f"{name} is not a csv file with the columns filename,label; {_WHERE}.") from None
    sizes = Counter(label for label, _ in pairs)
    if len(sizes) != CLASSES[split]:
        raise UserError(f"{name} lists {len(sizes)} classes instead of {CLASSES[split]}; {_WHERE}.")
    wrong = [f"{label} ({size})" for label, size in sizes.items() if size != PER_CLASS]
    if wrong or len(set(pairs)) != len(pairs):
        raise UserError(f"{name} should list {PER_CLASS} pictures a class, not {', '.join(wrong[:3])}; {_WHERE}.")
    return Listing([picture for _, picture in pairs], [label for label, _ in pairs])


def find_pictures(files: Files, listings: Mapping[str, Listing]) -> dict[str, str]:
    """Picture in the csv -> full name. The last part of a path decides, so any nesting will do."""
    wanted = {picture for listing in listings.values() for picture in listing.pictures}
    places: dict[str, str] = {}
    for name in files.names:
        picture = PurePosixPath(name).name
        if picture in wanted and places.setdefault(picture, name) != name:
            raise UserError(f"{places[picture]} and {name} have the same name; keep one of them.")
    for split, listing in listings.items():
        missing = [name for name in listing.pictures if name not in places]
        if missing:
            raise UserError(
                f"{split}.csv names {missing[0]}"
                + (f" and {len(missing) - 1:,} more files" if missing[1:] else "")
                + ", but no such picture is in the folders and zips given; add what is missing."
            )
    return places


def _pixels(files: Files, listing: Listing, places: Mapping[str, str], progress: Report, split: str) -> np.ndarray:
    names = [places[name] for name in listing.pictures]
    return decode_all(files, names, _decode, (SIZE, SIZE, 3), progress, f"reading {split}")


def _decode(data: bytes, name: str) -> np.ndarray:
    with opened(data, name) as image:
        if image.size != (SIZE, SIZE):
            raise UserError(
                f"{name} has {image.width} x {image.height} pixels where mini-ImageNet has {SIZE} x {SIZE}; resize all "
                "pictures, or get a copy that has been."
            )
        return np.asarray(image.convert("RGB"))


def _check(files: Files, listings: Mapping[str, Listing], places: Mapping[str, str], progress: Report) -> list[Finding]:
    seen: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    hashes = {}
    for split, listing in listings.items():
        pixels = _pixels(files, listing, places, progress, split)
        hashes[split] = _content_hash(listing, pixels)
        for name, picture in zip(listing.pictures, pixels, strict=True):
            seen[hashlib.sha256(picture.data).digest()].append((split, name))
    remarks = defaultdict(list)
    for group in (group for group in seen.values() if len(group) > 1):
        shown = " = ".join(f"{split}/{name}" for split, name in group)
        across = "across splits" if len({split for split, _ in group}) > 1 else "within the split"
        remarks[group[0][0]].append(f"same picture {across}: {shown}")
    return [
        Finding(
            f"{NAME} {split}",
            {"classes": len(set(listing.labels)), "pictures": len(listing.pictures)},
            hashes[split],
            KNOWN[split].get(hashes[split], ""),
            tuple(remarks[split]),
        )
        for split, listing in listings.items()
    ]


def _content_hash(listing: Listing, pixels: np.ndarray) -> str:
    digest = hashlib.sha256()
    digest.update("".join(f"{n},{c}\n" for n, c in zip(listing.pictures, listing.labels, strict=True)).encode())
    digest.update(pixels.data)
    return digest.hexdigest()
