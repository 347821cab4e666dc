"""Datasets by name: opened if they are prepared, prepared if their files are there, else a word on how to get them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from fastweights.data import mini_imagenet, omniglot, own, ptb, strokes
from fastweights.data.checks import Finding
from fastweights.data.images import open_images
from fastweights.data.items import Dataset
from fastweights.data.prepared import default_data_root, find_prepared, is_prepared, read_manifest
from fastweights.data.progress import Report, silent
from fastweights.data.texts import open_texts
from fastweights.errors import UserError

BENCHMARKS: dict[str, ModuleType] = {"omniglot": omniglot, "mini-imagenet": mini_imagenet, "ptb": ptb}
"""Each module has NAME, VARIANTS (the default first), have_raw, get, verify and prepare."""
NAMES = ("strokes", *BENCHMARKS)
_OPEN: dict[str, Callable[[Path], Dataset]] = {
    "omniglot": omniglot.open_prepared,
    "mini-imagenet": open_images,
    "ptb": open_texts,
}


def load(
    name: str | Path, root: Path | str | None = None, variant: str = "", progress: Report | None = None
) -> Dataset:
    """Open a dataset: strokes, omniglot, mini-imagenet, ptb, or the path of your own folder, zip, csv or JSONL file.

    A variant may also stand behind a colon: omniglot:vinyals.
    """
    root = Path(root) if root else default_data_root()
    name, variant = split_name(str(name), variant)
    if name == "strokes":
        if variant:
            raise UserError(f"strokes has no variants; {variant!r} is not among them.")
        return strokes.load(root, progress=_in_percent(progress) if progress else None)
    if name not in BENCHMARKS:
        if not name or not Path(name).exists():
            raise UserError(f"there is no dataset {name!r}: name one of {', '.join(NAMES)}, or a path that exists.")
        return own.load(Path(name), root, variant, progress or silent)
    variant = chosen_variant(name, variant)
    folder = find_prepared(root, prepared_name(name, variant)) or prepare(name, root, variant, progress)
    return _OPEN[name](folder)


def _in_percent(progress: Report) -> Callable[[float], None]:
    return lambda fraction: progress("drawing strokes", round(100 * fraction), 100)


def split_name(name: str, variant: str = "") -> tuple[str, str]:
    """omniglot:vinyals -> omniglot, vinyals. A path that exists is left as it is."""
    before, colon, after = name.rpartition(":")
    if not colon or variant or Path(name).exists():
        return name, variant
    return before, after


def chosen_variant(name: str, variant: str) -> str:
    """The variant asked for, if there is such a one; the default if none was."""
    variants = BENCHMARKS[name].VARIANTS
    if variant and variant not in variants:
        known = f"has the variants {', '.join(variants)}" if variants[0] else "has no variants"
        raise UserError(f"{name} {known}; {variant!r} is not among them.")
    return variant or str(variants[0])


def benchmark(name: str) -> ModuleType:
    """The module of a benchmark that comes as files."""
    if name not in BENCHMARKS:
        raise UserError(f"{name!r} is none of the benchmarks that come as files: {', '.join(BENCHMARKS)}.")
    return BENCHMARKS[name]


def prepared_name(name: str, variant: str) -> str:
    return f"{name}-{variant}" if variant else name


def prepared_folders(name: str, root: Path) -> dict[str, Path]:
    """Where the variants of a benchmark lie that are prepared, by variant."""
    folders = {variant: find_prepared(root, prepared_name(name, variant)) for variant in BENCHMARKS[name].VARIANTS}
    return {variant: folder for variant, folder in folders.items() if folder}


def is_made_from(folder: Path, findings: Sequence[Finding]) -> bool:
    """Whether a folder was prepared from the files that were looked at."""
    hashes = (read_manifest(folder) or {}).get("source_hashes", {})
    return set(hashes.values()) == {finding.content_hash for finding in findings}


def prepare(name: str, root: Path, variant: str = "", progress: Report | None = None) -> Path:
    """Write the prepared form of a benchmark from its raw files, anew if need be, and return its folder."""
    require_raw(name, root)
    folder = Path(BENCHMARKS[name].prepare(root, chosen_variant(name, variant), progress or silent))
    assert is_prepared(folder)
    return folder


def require_raw(name: str, root: Path) -> None:
    if not BENCHMARKS[name].have_raw(root):
        raise UserError(f"{name} is not under {root}; run `fastweights data get {name}`, or set FASTWEIGHTS_DATA.")
