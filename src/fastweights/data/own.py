"""Your own data: a folder (or zip) with one folder of pictures per class, or a csv/JSONL file of labelled texts.

Pictures of any size and mode are rotated by their EXIF tag, scaled to 8 bits, put on white where transparent, cropped
to the central square and resized: to 28 x 28 if most are grey, to 84 x 84 in colour otherwise, unless the variant says
something else ("64", "grey", "64-rgb"). Texts are lower-cased and split into words; the vocabulary is that of the
training classes.

Classes are divided into train, val and test (64 / 16 / 20 %) by a draw that depends on their names only, unless folders
named train, val and test (for texts: a column `split`) divide them.
"""

import csv
import hashlib
import io
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fastweights.data.checks import frozen_shuffle
from fastweights.data.images import SUFFIXES, decode_all, opened
from fastweights.data.items import Dataset
from fastweights.data.prepared import Split, is_prepared, open_dataset, prepared_folder, save_splits, user_cache
from fastweights.data.sources import Files, files_under, read_file
from fastweights.data.texts import by_frequency, tokenised, vocabulary_of
from fastweights.utils.arguments import shown
from fastweights.utils.errors import UserError
from fastweights.utils.files import read_text
from fastweights.utils.progress import Report, silent
from fastweights.utils.reading import parse_json

SPLITS = ("train", "val", "test")
ALMOST_SPLITS = frozenset([*SPLITS, "training", "valid", "validation", "dev", "testing"])
"""Other common names of folders of splits, in lower case."""
UNREADABLE = (".heic", ".heif", ".avif", ".jp2", ".svg", ".psd", ".dng", ".cr2", ".nef", ".arw")
"""Pictures of formats that are not supported."""
VALIDATION, TEST = 0.16, 0.20
GREY_SIZE, COLOUR_SIZE = 28, 84
GREY_MODES = ("1", "L", "LA", "La", "I", "F")
LARGEST_SIDE = 4096
"""Pixels; no model sees larger pictures."""
LOOKED_AT = 200
"""Pictures sampled to tell grey from colour."""
LENGTH, MOST_WORDS = 64, 20_000
"""Tokens to which texts are truncated; words of the vocabulary, the most frequent ones of the training texts."""
TEXT_SUFFIXES = (".csv", ".jsonl")

Groups = dict[str, dict[str, list[str]]]
"""split -> class -> pictures or texts."""


def load(path: Path, root: Path, variant: str = "", progress: Report = silent) -> Dataset:
    """Open own data, preparing it first if it has changed or the variant is new."""
    is_text = path.suffix.lower() in TEXT_SUFFIXES
    if is_text and variant:
        raise UserError(f"{path} holds texts, which have no variants; {variant!r} is for pictures.")
    if not _is_unicode(str(path.resolve())):
        raise UserError(f"{str(path)!r} has a name that is not Unicode; rename it.")
    source = _source(path, variant)
    folder = prepared_folder(root, f"own-{source}-{_signature(path)}")
    if not is_prepared(folder):
        if is_text:
            prepare_texts(path, folder)
        else:
            prepare_images(path, folder, variant, progress)
        for stale in folder.parent.glob(f"own-{source}-*"):
            if stale != folder:
                shutil.rmtree(stale, ignore_errors=True)
    return open_dataset(folder)


def has_been_prepared(path: Path, root: Path, variant: str = "") -> bool:
    """Whether somebody has had data at this path prepared before, be they as they are now or not."""
    places = (root, user_cache())
    pattern = f"own-{_source(path, variant)}-*"
    return any(True for place in places for _ in (place / "prepared").glob(pattern))


def _source(path: Path, variant: str) -> str:
    """What prepared folders of a path are called by."""
    return hashlib.sha256(f"{path.resolve()}:{variant}".encode(errors="surrogateescape")).hexdigest()[:8]


def _is_unicode(name: str) -> bool:
    """Whether a name can be written into a file: those of files need not be, and JSON can tell of halves of letters."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _signature(path: Path) -> str:
    """Changes when a file is added, removed or edited, so that a stale prepared folder is never opened."""
    digest = hashlib.sha256()
    for name in sorted(files_under(path.resolve())):
        try:
            facts = name.stat()
        except OSError:
            raise UserError(f"{name} is a link to a file that is not there; remove it.") from None
        digest.update(f"{name}:{facts.st_size}:{facts.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


# Pictures


def prepare_images(path: Path, folder: Path, variant: str = "", progress: Report = silent) -> None:
    size, channels, negative = _parse_variant(variant)
    with Files([path]) as files:
        groups = _group_pictures(files, path)
        if channels is None:
            channels = 1 if _mostly_grey(files, groups) else 3
        size = size or (GREY_SIZE if channels == 1 else COLOUR_SIZE)
        decode = partial(_decode, shape=(size, size, channels), negative=negative)
        splits = {}
        for split, classes in groups.items():
            names = [name for pictures in classes.values() for name in pictures]
            values = decode_all(files, names, decode, (size, size, channels), progress, f"reading {split}")
            splits[split] = Split(values, [len(pictures) for pictures in classes.values()], list(classes))
    save_splits(folder, splits, {"name": str(path.resolve()), "variant": variant, "size": size, "channels": channels})


def read_pictures(paths: Iterable[Path | str], shape: Sequence[int], *, negative: bool = False) -> Tensor:
    """Pictures in files as the items of one task: bytes (1, pictures, height, width, channels).

    They are prepared like those of one's own datasets, in the shape that a model takes (`item_shape` of its settings);
    `negative` turns black on white into the bright ink on dark paper of `strokes` and Omniglot.
    """
    if isinstance(paths, (str, Path)):
        raise UserError(f"read_pictures takes a list of files; write [{str(paths)!r}].")
    if not isinstance(paths, Iterable):
        raise UserError(f"read_pictures takes a list of files, not {shown(paths)}.")
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    is_shape = len(sizes) == 3 and all(type(size) is int and 1 <= size <= LARGEST_SIDE for size in sizes)
    if not is_shape or sizes[2] not in (1, 3):
        wanted = f"a height, a width (1 to {LARGEST_SIDE:,}) and 1 or 3 channels"
        raise UserError(f"pictures have {wanted}, not the shape {shown(sizes or shape)}.")
    pixels = [_decode(read_file(path), str(path), shape, negative) for path in paths]
    if not pixels:
        raise UserError("no pictures were named; read_pictures takes a list of files.")
    return torch.from_numpy(np.stack(pixels)).unsqueeze(0)


def _parse_variant(variant: str) -> tuple[int | None, int | None, bool]:
    """ "64-grey-negative" -> (64, 1, True); "" -> (None, None, False)."""
    match = re.fullmatch(r"(\d{1,4})?-?(grey|rgb)?-?(negative)?", variant)
    size = int(match[1]) if match and match[1] else None
    if not match or (size is not None and not 4 <= size <= 1024):
        known = "a size from 4 to 1024, grey or rgb, negative, or several, as in 64-grey-negative"
        raise UserError(f"{variant!r} is no way to prepare pictures; write {known}.")
    return size, {"grey": 1, "rgb": 3, None: None}[match[2]], bool(match[3])


def _group_pictures(files: Files, path: Path) -> Groups:
    parts_of = {name: Path(name).relative_to(path).parts for name in files.names if name.lower().endswith(SUFFIXES)}
    if not parts_of:
        texts = "; texts come as .csv or .jsonl" if path.is_file() else ""
        raise UserError(f"no pictures ({', '.join(SUFFIXES)}) are in {path}; make a folder of them per class{texts}.")
    _require_pictures(files, {Path(name).parent for name in parts_of}, path)
    while all(len(p) > 2 for p in parts_of.values()) and len({p[0] for p in parts_of.values()}) == 1:
        parts_of = {name: parts[1:] for name, parts in parts_of.items()}  # everything is in one outer folder
    loose = next((name for name, parts in parts_of.items() if len(parts) < 2), None)
    if loose:
        raise UserError(f"{loose} is in no class folder; make a folder of pictures per class.")
    has_splits = _has_split_folders(parts_of.values(), path)
    rows = ((parts[0] if has_splits else "", "/".join(parts[has_splits:-1]), name) for name, parts in parts_of.items())
    return _group(rows, path)


def _require_pictures(files: Files, folders_with: set[Path], path: Path) -> None:
    """Refuse a folder that looks like a class, but would be left out because none of its pictures can be read."""
    above = {parent for folder in folders_with for parent in folder.parents}
    for name in files.names:
        folder = Path(name).parent
        if name.lower().endswith(UNREADABLE) and folder not in folders_with | above:
            found = f"no picture of a supported format ({', '.join(SUFFIXES)}), but {Path(name).name}"
            raise UserError(f"{folder} holds {found}; convert these, or move the folder out of {path}.")


def _has_split_folders(paths: Iterable[tuple[str, ...]], path: Path) -> bool:
    """Whether all classes are in train, val and test. One such folder alone may be a class of that name."""
    splits = {parts[0] for parts in paths if parts[0] in SPLITS and len(parts) > 2}
    others = sorted({parts[0] for parts in paths} - splits)
    if others and all(name.lower() in ALMOST_SPLITS for name in (*splits, *others)):
        found = ", ".join(sorted({*splits, *others}))
        raise UserError(f"{path} has the folders {found}; if these are splits, call them train, val and test.")
    if len(splits) > 1 and others:
        found = f"{' and '.join(sorted(splits))}, and {others[0]} beside them"
        raise UserError(f"{path} has the folders {found}; put all classes into train, val and test, or none.")
    return not others


def _group(rows: Iterator[tuple[str, str, str]], path: Path) -> Groups:
    """(split or nothing, class, item) in any order -> the items of each class of each split, sorted by class."""
    items_of: defaultdict[str, list[str]] = defaultdict(list)
    split_of: dict[str, str] = {}
    for split, label, item in rows:
        if not _is_unicode(label):
            raise UserError(f"{path}: class {label!r} has a name that is not Unicode; rename it.")
        items_of[label].append(item)
        if split_of.setdefault(label, split) != split:
            both = " and ".join(one or "no split" for one in (split_of[label], split))
            raise UserError(f"{path}: class {label!r} is in both {both}; a class has one split.")
    if not any(split_of.values()):
        split_of = _draw_splits(split_of, path)
    without = next((label for label, split in split_of.items() if not split), None)
    if without is not None:
        raise UserError(f"{path}: class {without!r} has no split, but others have one; give one to all, or to none.")
    groups = {split: {c: items_of[c] for c in sorted(items_of) if split_of[c] == split} for split in SPLITS}
    empty = [split for split, classes in groups.items() if not classes]
    if empty:
        raise UserError(f"{path} has no classes for {' and '.join(empty)}; give each of train, val and test some.")
    return groups


def _draw_splits(classes: Collection[str], path: Path) -> dict[str, str]:
    if len(classes) < 3:
        raise UserError(f"{path} has {len(classes)} classes, but train, val and test need at least one each.")
    test, val = (max(1, round(share * len(classes))) for share in (TEST, VALIDATION))
    splits = ["test"] * test + ["val"] * val
    return dict(zip_longest(frozen_shuffle(classes), splits, fillvalue="train"))


def _mostly_grey(files: Files, groups: Groups) -> bool:
    names = [name for classes in groups.values() for pictures in classes.values() for name in pictures]
    looked_at = names[:: -(-len(names) // LOOKED_AT)]
    grey = 0
    for name in looked_at:
        with opened(files.read(name), name) as image:
            grey += image.mode.startswith("I;") or image.mode in GREY_MODES
    return grey * 2 > len(looked_at)


def _decode(data: bytes, name: str, shape: Sequence[int], negative: bool) -> np.ndarray:
    with opened(data, name) as image:
        return as_pixels(ImageOps.exif_transpose(image), name, shape, negative)


def as_pixels(image: Image.Image, name: str, shape: Sequence[int], negative: bool) -> np.ndarray:
    """A picture cut to a shape (height, width, channels), transparency on white, perhaps inverted: uint8."""
    height, width, channels = shape
    upright = eight_bit(image, name)
    if "A" in upright.getbands() or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    grey_or_rgb = upright.convert("L" if channels == 1 else "RGB")
    fitted = ImageOps.fit(grey_or_rgb, (width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(fitted).reshape(tuple(shape))
    return 255 - pixels if negative else pixels


def eight_bit(image: Image.Image, name: str) -> Image.Image:
    """A picture of 8 bits a channel. Pillow clips pixels of modes with more; scale these, unless they fit into 8."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image, dtype=np.float64)
    if not np.isfinite(values).all():
        raise UserError(f"{name} has pixels that are NaN or infinite; save the picture again.")
    brightest = values.max(initial=0)
    white = brightest or 1.0
    if image.mode.startswith("I"):
        white = next((depth for depth in (255.0, 65535.0) if brightest <= depth), brightest)
    scaled = Image.fromarray((values.clip(0, None) / white * 255).round().astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):  # the one shade of a PNG of 16 bits that is transparent
        scaled.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return scaled


# Texts


def prepare_texts(path: Path, folder: Path) -> None:
    groups = _group(_read_texts(path), path)
    words = {split: {c: [words_of(t) for t in texts] for c, texts in of.items()} for split, of in groups.items()}
    counts = Counter(word for texts in words["train"].values() for text in texts for word in text)
    vocabulary = vocabulary_of(by_frequency(counts)[:MOST_WORDS])
    splits = {}
    for split, classes in words.items():
        texts = [text for of_class in classes.values() for text in of_class]
        splits[split] = Split(
            values=tokenised(texts, vocabulary, LENGTH),
            sizes=[len(of_class) for of_class in classes.values()],
            names=list(classes),
            sentence_of=np.arange(len(texts), dtype=np.int64),
            target_of=np.full(len(texts), -1, dtype=np.int32),
        )
    manifest = {"name": str(path.resolve()), "variant": "", "blanked": False, "length": LENGTH}
    save_splits(folder, splits, manifest, vocabulary)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _read_texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """(split or nothing, label, text) of every row."""
    for line, row in rows_of(path, ("text", "label")):
        text, label, split = row.get("text"), row.get("label"), row.get("split") or ""
        if not isinstance(text, str) or label is None or isinstance(label, (list, dict)) or not str(label).strip():
            raise UserError(f"{path}, line {line}, lacks a text or a label; every row needs both.")
        if not words_of(text):
            raise UserError(f"{path}, line {line}, has a text without words; remove it.")
        if split not in ("", *SPLITS):
            raise UserError(f"{path}, line {line}, has the split {split!r}; write train, val or test.")
        yield str(split), str(label).strip(), text


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """The numbered rows of a .csv, .tsv or .jsonl file, tables with at least these columns, or the lines of a .txt."""
    content = read_text(path).removeprefix("\ufeff")
    ending = path.suffix.lower()
    if ending in (".jsonl", ".txt"):
        for line, written in enumerate(content.split("\n"), 1):
            if written.strip():
                yield line, {"text": written} if ending == ".txt" else _json_row(written, f"{path}, line {line},")
        return
    reader = csv.DictReader(io.StringIO(content, newline=""), delimiter="\t" if ending == ".tsv" else ",")
    try:
        if not set(columns) <= set(reader.fieldnames or ()):
            wanted = f"the columns {' and '.join(columns)}" if len(columns) > 1 else f"a column called {columns[0]}"
            raise UserError(f"{path} needs {wanted} in its first line.")
        for name in (*columns, "split"):
            if (reader.fieldnames or []).count(name) > 1:
                raise UserError(f"{path} has two columns called {name}; remove or rename one.")
        for row in reader:
            if None in row:
                where = f"{path}, line {reader.line_num},"
                raise UserError(f"{where} has more fields than the first line; put quotes around texts with commas.")
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}, line {max(1, reader.line_num)}, is not csv ({error}).") from None


def _json_row(row: str, where: str) -> Mapping[str, object]:
    try:
        parsed = parse_json(row)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UserError(f'{where} is not a JSON object such as {{"text": "...", "label": "..."}}.')
    return parsed
