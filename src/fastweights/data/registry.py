"""Datasets by name: opened if prepared, prepared if their files are there, else an error that says how to get them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, NoneType

from fastweights.data import drawings, mini_imagenet, omniglot, own, ptb, strokes
from fastweights.data.checks import Finding
from fastweights.data.items import Dataset
from fastweights.data.prepared import default_data_root, find_prepared, open_dataset, read_manifest
from fastweights.utils.arguments import require
from fastweights.utils.errors import UserError, did_you_mean
from fastweights.utils.progress import Report, silent

BENCHMARKS: dict[str, ModuleType] = {
    "omniglot": omniglot,
    "mini-imagenet": mini_imagenet,
    "ptb": ptb,
    "drawings": drawings,
}
"""Each module has NAME, VARIANTS (the default first), have_raw, get, verify and prepare."""
NAMES = ("strokes", *BENCHMARKS)


def load(
    name: str | Path, root: Path | str | None = None, variant: str = "", progress: Report | None = None
) -> Dataset:
    """Open a dataset: strokes, omniglot (also as omniglot:vinyals), ..., or your own folder, zip, csv or JSONL file."""
    require("the name of a dataset", name, (str, Path), "a text or a path")
    require("the name of a variant", variant, str, "a text")
    require("a data root", root, (str, Path, NoneType), "a path or a text")
    root = Path(root) if root else default_data_root()
    name = str(name)
    if ":" in name and not variant and not Path(name).exists():
        name, _, variant = name.rpartition(":")
    if name == "strokes":
        if variant:
            raise UserError(f"strokes has no variants; {variant!r} is not among them.")
        report = progress or silent
        return strokes.load(root, progress=lambda done: report("drawing strokes", round(100 * done), 100))
    if name not in BENCHMARKS:
        if not name or not Path(name).exists():
            near = did_you_mean(name, NAMES)
            raise UserError(f"there is no dataset {name!r}{near}; name {', '.join(NAMES)}, or a path that exists.")
        return own.load(Path(name), root, variant, progress or silent)
    variant = chosen_variant(name, variant)
    folder = find_prepared(root, prepared_name(name, variant)) or prepare(name, root, variant, progress)
    return replace(open_dataset(folder), rotated=name in (omniglot.NAME, drawings.NAME))


def require_familiar(file: Path, name: str, variant: str, root: Path | None) -> None:
    """Refuse to read a folder just because a model's file names it: only benchmarks, and data used here before."""
    if (
        name in NAMES
        or not Path(name).exists()
        or own.has_been_prepared(Path(name), root or default_data_root(), variant)
    ):
        return
    raise UserError(
        f"{file} says that it was trained on {name!r}, which has not been used here; name the dataset yourself if it "
        "is to be read."
    )


def chosen_variant(name: str, variant: str) -> str:
    """The requested variant, or the default; an error if there is no such variant."""
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
    """The prepared folders of a benchmark, by variant."""
    folders = {variant: find_prepared(root, prepared_name(name, variant)) for variant in BENCHMARKS[name].VARIANTS}
    return {variant: folder for variant, folder in folders.items() if folder}


def is_made_from(folder: Path, findings: Sequence[Finding]) -> bool:
    """Whether a folder was prepared from the files that were checked."""
    hashes = (read_manifest(folder) or {}).get("source_hashes", {})
    return set(hashes.values()) == {finding.content_hash for finding in findings}


def prepare(name: str, root: Path, variant: str = "", progress: Report | None = None) -> Path:
    """Write the prepared form of a benchmark from its raw files, again if need be, and return its folder."""
    require_raw(name, root)
    return Path(BENCHMARKS[name].prepare(root, chosen_variant(name, variant), progress or silent))


def require_raw(name: str, root: Path) -> None:
    if not BENCHMARKS[name].have_raw(root):
        raise UserError(f"{name} is not under {root}; run `fastweights data get {name}`, or set FASTWEIGHTS_DATA.")
