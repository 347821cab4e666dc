"""mini-ImageNet with the split of Ravi & Larochelle (2017): 64 / 16 / 20 classes of 600 colour pictures, 84 x 84.

Raw files: train.csv, val.csv and test.csv (columns filename,label) and the pictures they name, in folders or zips of
any nesting; pictures are found by file name. ImageNet's terms allow no public download, so users bring their own.
"""

import csv
import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from fastweights.data.checks import Finding, provenance
from fastweights.data.images import decode_all, opened
from fastweights.data.prepared import Split, prepared_folder, save_splits
from fastweights.data.sources import Files, write_bytes, write_zip
from fastweights.utils.errors import UserError
from fastweights.utils.progress import Report, silent

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
"""Known SHA-256 over file names, labels and pixels of each split, and their names."""
HOW_TO_GET = (
    "mini-ImageNet has no public download, because ImageNet's terms forbid one; get train.csv, val.csv and test.csv "
    "from github.com/twitter-research/meta-learning-lstm (folder data/miniImagenet) and the 60,000 pictures they name, "
    "84 x 84 pixels, from your own ILSVRC-2012 copy or a colleague's zip, and hand over the folders or zips."
)


@dataclass(frozen=True)
class Listing:
    """The contents of one csv file, sorted by label, then by file name."""

    pictures: Sequence[str]
    labels: Sequence[str]

    def rows(self) -> str:
        return "".join(f"{name},{label}\n" for name, label in zip(self.pictures, self.labels, strict=True))


def have_raw(root: Path) -> bool:
    return all((root / NAME / f"{split}.csv").exists() for split in CLASSES)


def get(root: Path, given: Sequence[Path] = (), progress: Report = silent) -> list[Finding]:
    """Check the given files and pack them under the data root as three csv files and one zip."""
    if not given:
        raise UserError(HOW_TO_GET)
    with Files(given) as files:
        listings = read_listings(files)
        places = find_pictures(files, listings)
        findings = _check(files, listings, places, progress)
        names = [name for listing in listings.values() for name in listing.pictures]
        write_zip(root / NAME / "images.zip", ((f"images/{name}", files.read(places[name])) for name in names))
    for split, listing in listings.items():  # last: their presence marks the import as complete
        write_bytes(root / NAME / f"{split}.csv", f"filename,label\n{listing.rows()}".encode())
    return findings


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
            pixels, hashes[split] = _read(files, listing, places, progress, split)
            sizes = Counter(listing.labels)
            splits[split] = Split(pixels, list(sizes.values()), list(sizes))
    manifest = {"name": NAME, "variant": "", **provenance(hashes, KNOWN), "size": SIZE}
    return save_splits(prepared_folder(root, NAME), splits, manifest)


def read_listings(files: Files) -> dict[str, Listing]:
    """The three csv files, wherever they are, checked for counts and for classes listed in two of them."""
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
            more = f" and {len(missing) - 1:,} more files" if missing[1:] else ""
            raise UserError(f"{split}.csv names {missing[0]}{more}, which is not in the files given; add it.")
    return places


def _read(
    files: Files, listing: Listing, places: Mapping[str, str], progress: Report, split: str
) -> tuple[np.ndarray, str]:
    """The pixels of a split, and the hash of its contents."""
    names = [places[name] for name in listing.pictures]
    pixels = decode_all(files, names, _decode, (SIZE, SIZE, 3), progress, f"reading {split}")
    digest = hashlib.sha256(listing.rows().encode())
    digest.update(pixels.data)
    return pixels, digest.hexdigest()


def _decode(data: bytes, name: str) -> np.ndarray:
    with opened(data, name, SIZE) as image:
        return np.asarray(image.convert("RGB"))


def _check(files: Files, listings: Mapping[str, Listing], places: Mapping[str, str], progress: Report) -> list[Finding]:
    seen: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    hashes = {}
    for split, listing in listings.items():
        pixels, hashes[split] = _read(files, listing, places, progress, split)
        for name, picture in zip(listing.pictures, pixels, strict=True):
            seen[hashlib.sha256(picture.data).digest()].append((split, name))
    remarks = defaultdict(list)
    for group in (group for group in seen.values() if len(group) > 1):
        shown = " = ".join(f"{split}/{name}" for split, name in group)
        across = "across splits" if len({split for split, _ in group}) > 1 else "within the split"
        remarks[group[0][0]].append(f"same picture {across}: {shown}")
    findings = []
    for split, listing in listings.items():
        counts = {"classes": len(set(listing.labels)), "pictures": len(listing.pictures)}
        known_as = KNOWN[split].get(hashes[split], "")
        findings.append(Finding(f"{NAME} {split}", counts, hashes[split], known_as, tuple(remarks[split])))
    return findings
