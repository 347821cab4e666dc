"""The command line's `data` group: list, get, verify, prepare, show."""

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fastweights.cli.common import load_dataset, require_no_picture_of_texts
from fastweights.cli.evaluate import sentences_table
from fastweights.cli.options import RootOption as Root
from fastweights.data import registry as named
from fastweights.data.checks import Finding
from fastweights.data.images import contact_sheet
from fastweights.data.items import Dataset, TextItems
from fastweights.data.prepared import default_data_root, is_writable, require_intact
from fastweights.data.sources import write_whole
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.utils.console import bars
from fastweights.utils.errors import UserError, unknown
from fastweights.utils.files import picture_format

SHEETS = (".png", ".jpg")
"""What contact sheets can be written as."""

data = typer.Typer(help="Get, check, prepare and look at datasets.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(help="omniglot, mini-imagenet, ptb, drawings, strokes, or the path of your own data.")
]
Benchmark = Annotated[str, typer.Argument(help="omniglot, mini-imagenet, ptb or drawings.")]
Variant = Annotated[str, typer.Option("--variant", help="Which split or protocol; own pictures: a size, grey, rgb.")]


@data.command("list")
def list_datasets(data_root: Root = None) -> None:
    """List the datasets, and which of them are here."""
    root = data_root or default_data_root()
    table = Table("name", "variants", "files", "prepared")
    table.add_row("strokes", "", "built in", "")
    for name, module in named.BENCHMARKS.items():
        ready = [variant or "yes" for variant in named.prepared_folders(name, root)]
        files = "there" if module.have_raw(root) else "missing"
        table.add_row(name, ", ".join(module.VARIANTS), files, ", ".join(ready) or "no")
    Console().print(table)
    typer.echo(f"under {root}; what is missing comes with: fastweights data get NAME")


@data.command()
def get(
    name: Benchmark,
    given: Annotated[
        list[Path] | None, typer.Option("--from", help="A file or folder that you have already; may be repeated.")
    ] = None,
    data_root: Root = None,
) -> None:
    """Download a benchmark, or take over files you have (zips, folders, any nesting), and check the contents."""
    root = data_root or default_data_root()
    module = named.benchmark(name)
    if not given and module.have_raw(root):
        typer.echo(f"{name} is already under {root}; checking it.")
        return verify(name, root)
    if not is_writable(root):
        raise UserError(f"{root} is read-only; name another place with --data-root or FASTWEIGHTS_DATA.")
    try:
        with bars() as progress:
            findings = module.get(root, given or (), progress)
    except UserError as error:
        if given:
            raise
        raise UserError(f"{str(error).rstrip('.')}: fastweights data get {name} --from FOLDER_OR_ZIP.") from None
    _print_findings(findings)
    for folder in named.prepared_folders(name, root).values():
        if not named.is_made_from(folder, findings):
            shutil.rmtree(folder)
            typer.echo(f"removed {folder}, which was made from other files")
    typer.echo(f"{name} is now under {root}.")


@data.command()
def verify(name: Benchmark, data_root: Root = None) -> None:
    """Check a benchmark's files: counts, the hash of their contents, and what differs from what is known."""
    root = data_root or default_data_root()
    module = named.benchmark(name)
    named.require_raw(name, root)
    with bars() as progress:
        findings = module.verify(root, progress)
    _print_findings(findings)
    for folder in named.prepared_folders(name, root).values():
        require_intact(folder)
        if not named.is_made_from(folder, findings):
            raise UserError(f"{folder} was prepared from other files than those under {root}; delete it.")
        typer.echo(f"prepared form intact: {folder}")


@data.command()
def prepare(name: Name, variant: Variant = "", data_root: Root = None) -> None:
    """Turn a dataset's files into the form that training opens in no time; done by itself when first needed."""
    dataset = load_dataset(name, data_root, variant)
    table = Table("split", "classes", "items", title=f"{dataset.full_name}", title_justify="left")
    for split, items in dataset.splits.items():
        table.add_row(split, f"{items.classes:,}", f"{int(items.offsets[-1]):,}")
    Console().print(table)
    typer.echo(f"content hash {dataset.content_hash}\nprepared in {dataset.folder}")


@data.command()
def show(
    name: Name,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The contact sheet: a .png or .jpg.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="How many tasks to print (text).")] = 2,
    shot: Annotated[int, typer.Option(min=1, help="Examples of each class (text).")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another seed shows other items.")] = 0,
    variant: Variant = "",
    data_root: Root = None,
) -> None:
    """Look at a dataset: a contact sheet of pictures with a class in each row, or some tasks in words."""
    file_format = "png" if out is None else picture_format(out, SHEETS)
    dataset = load_dataset(name, data_root, variant)
    require_no_picture_of_texts(dataset, out)
    if split not in dataset.splits:
        raise unknown(f"split of {dataset.full_name} called", split, dataset.splits)
    if isinstance(dataset.splits[split], TextItems):
        return _print_tasks(dataset, split, tasks, shot, seed)
    out = out or Path(f"{Path(dataset.full_name).name.replace(':', '-')}-{split}.png")
    sheet = contact_sheet(dataset.splits[split], seed=seed)
    write_whole(out, lambda draft: sheet.save(draft, format=file_format))
    typer.echo(f"wrote {out}")


def _print_findings(findings: list[Finding]) -> None:
    console = Console()
    for finding in findings:
        counts = ", ".join(f"{count:,} {what}" for what, count in finding.counts.items())
        known = f"known: {finding.known_as}" if finding.known_as else "[yellow]an unknown variant[/yellow]"
        console.print(f"[bold]{finding.what}[/bold]: {counts}; {known}", highlight=False, soft_wrap=True)
        console.print(f"  contents {finding.content_hash}", highlight=False, soft_wrap=True)
        for remark in finding.remarks:
            console.print(f"  {remark}", highlight=False, markup=False, soft_wrap=True)


def _print_tasks(dataset: Dataset, split: str, tasks: int, shot: int, seed: int) -> None:
    items = dataset.splits[split].with_at_least(shot + 1)
    if items.classes < 2:
        raise UserError(
            f"a task needs 2 classes of {shot + 1} texts, but {dataset.full_name} {split} has {items.classes}; ask for "
            "another --split or a smaller --shot."
        )
    sampler = EpisodeSampler(items, min(5, items.classes), shot, 1)
    positions = sampler.positions(tasks, torch.Generator().manual_seed(seed))
    for number, task in enumerate(positions.split(1), 1):
        names = items.names_of(task[0, :, 0])
        Console().print(
            sentences_table(sampler.episode(task), names, dataset.manifest["vocabulary"], title=f"task {number}")
        )
