"""The command line's `data` group: list, get, verify, prepare, show."""

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.data import named
from fastweights.data.checks import Finding
from fastweights.data.images import contact_sheet
from fastweights.data.items import Dataset, TextItems
from fastweights.data.prepared import default_data_root, is_writable, require_intact
from fastweights.data.progress import bars
from fastweights.data.sources import write_whole
from fastweights.data.texts import written_out
from fastweights.episodes import EpisodeSampler
from fastweights.errors import UserError
from fastweights.files import picture_format

SHEETS = (".png", ".jpg")
"""What contact sheets can be written as."""

app = typer.Typer(help="Get, check, prepare and look at datasets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="omniglot, mini-imagenet, ptb, strokes, or the path of your own data.")]
Benchmark = Annotated[str, typer.Argument(help="omniglot, mini-imagenet or ptb.")]
Root = Annotated[Path | None, typer.Option("--data-root", help="Where datasets lie, if not in FASTWEIGHTS_DATA.")]
Variant = Annotated[str, typer.Option("--variant", help="Which split or protocol; own pictures: a size, grey, rgb.")]


@app.command("list")
def list_datasets(data_root: Root = None) -> None:
    """Say which datasets there are, and which of them are at hand."""
    root = data_root or default_data_root()
    table = Table("name", "variants", "files", "prepared")
    table.add_row("strokes", "", "built in", "")
    for name, module in named.BENCHMARKS.items():
        ready = [variant or "yes" for variant in named.prepared_folders(name, root)]
        files = "there" if module.have_raw(root) else "missing"
        table.add_row(name, ", ".join(module.VARIANTS), files, ", ".join(ready) or "no")
    Console().print(table)
    typer.echo(f"under {root}; what is missing comes with: fastweights data get NAME")


@app.command()
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
    with bars() as progress:
        findings = module.get(root, given or (), progress)
    _print_findings(findings)
    for folder in named.prepared_folders(name, root).values():
        if not named.is_made_from(folder, findings):
            shutil.rmtree(folder)
            typer.echo(f"removed {folder}, which was made from other files")
    typer.echo(f"{name} is now under {root}.")


@app.command()
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


@app.command()
def prepare(name: Name, variant: Variant = "", data_root: Root = None) -> None:
    """Turn a dataset's files into the form that training opens in no time; done by itself when first needed."""
    with bars() as progress:
        dataset = named.load(name, data_root, variant, progress)
    table = Table("split", "classes", "items", title=f"{dataset.full_name}", title_justify="left")
    for split, items in dataset.splits.items():
        table.add_row(split, f"{items.classes:,}", f"{int(items.offsets[-1]):,}")
    Console().print(table)
    typer.echo(f"content hash {dataset.content_hash}\nprepared in {dataset.folder}")


@app.command()
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
    with bars() as progress:
        dataset = named.load(name, data_root, variant, progress)
    require_no_picture_of_texts(dataset, out)
    if split not in dataset.splits:
        raise UserError(f"{dataset.full_name} has no split {split!r}, but {', '.join(dataset.splits)}.")
    if isinstance(dataset.splits[split], TextItems):
        return _print_tasks(dataset, split, tasks, shot, seed)
    out = out or Path(f"{Path(dataset.full_name).name.replace(':', '-')}-{split}.png")
    sheet = contact_sheet(dataset.splits[split], seed=seed)
    write_whole(out, lambda draft: sheet.save(draft, format=file_format))
    typer.echo(f"wrote {out}")


def require_no_picture_of_texts(dataset: Dataset, out: Path | None) -> None:
    if dataset.vocabulary and out is not None:
        raise UserError(f"{dataset.full_name} holds texts, whose tasks go to the terminal; leave out -o.")


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
    way = min(5, items.classes)
    sampler = EpisodeSampler(items, way, shot, 1)
    positions = sampler.positions(tasks, torch.Generator().manual_seed(seed))
    vocabulary = dataset.manifest["vocabulary"]
    for number, task in enumerate(positions, 1):
        table = Table("class", "", "text", title=f"task {number}", title_justify="left")
        for of_class in task:
            (name,) = items.names_of(of_class[:1])
            for place, tokens in enumerate(items.gather(of_class)):
                text = Text(written_out(tokens.tolist(), vocabulary))
                last = place == shot
                table.add_row(Text("" if place else name), "guess" if last else "learn", text)
            table.add_section()
        Console().print(table)
