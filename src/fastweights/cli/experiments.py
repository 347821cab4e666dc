"""The command line's `reproduce`, `report` and `results`."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.options import DeviceOption, PrecisionOption, RootOption
from fastweights.cli.progress import ProgressBar
from fastweights.experiments import ledger as ledgers
from fastweights.experiments import run as work
from fastweights.experiments import search as searching
from fastweights.experiments.plan import Run, choose, missing, parse_cell
from fastweights.experiments.report import write as reports  # deferred: matplotlib is slow to import
from fastweights.experiments.run import AT_ONCE, Workspace, estimate, find_commit
from fastweights.experiments.tables import parse_experiment
from fastweights.training.logs import Sink
from fastweights.utils.console import bars, console, say
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError
from fastweights.utils.precision import choose_precision

results = typer.Typer(help="The ledger of finished runs.", no_args_is_help=True)
LedgerOption = Annotated[Path, typer.Option("--ledger", help="The ledger.")]
CommitOption = Annotated[str, typer.Option(help="Commit of this code. (default: as git says)")]
LEDGER, SEARCH = Path("results/runs.jsonl"), Path("results/search.jsonl")


def reproduce(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE|CELL]...",
            help="omniglot, mini-imagenet, ptb, ablation; an experiment, ptb-5way-1shot; or a cell, "
            "mini-imagenet-5way-1shot/fwcnn-hebb, with /truncated, say, behind it. (default: everything)",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of each cell, from 0 on.")] = 5,
    budget: Annotated[str, typer.Option(help="Time to spend: 90s, 9m, 2h. (default: no end)")] = "",
    recipe: Annotated[str, typer.Option(help="Only this one: best, paper, own or paper-long.")] = "",
    learner: Annotated[str, typer.Option(help="Only this model.")] = "",
    protocol: Annotated[str, typer.Option(help="Only this division of the text: standard or pooled.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, with the times of earlier runs.")] = False,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Fan the runs out over the Ray cluster of RAY_ADDRESS, or one of this machine."),
    ] = False,
    ray_address: Annotated[str, typer.Option(help="The same over the Ray cluster at this address.")] = "",
    at_once: Annotated[
        int,
        typer.Option(
            min=0,
            help="Train up to so many small runs of a dataset side by side, each as it would be trained alone; "
            f"0: {AT_ONCE['cuda']} on a GPU, 1 elsewhere.",
        ),
    ] = 0,
    data_root: RootOption = None,
    ledger: LedgerOption = LEDGER,
    runs: Annotated[Path, typer.Option(help="Folder of checkpoints and logs.")] = Path("runs/reproduce"),
    commit: CommitOption = "",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Run what is missing in the ledger, most wanted first; the next call goes on where this one stopped."""
    started = time.monotonic()
    deadline = started + parse_time(budget)
    chosen = choose(wanted or [], seeds, recipe, learner, protocol)
    if not chosen:
        raise UserError("no run of the plan is both of these; leave out an option, or name the cell itself.")
    if dry_run:
        _print_plan(chosen, ledger)
        return
    workspace = _workspace(device, precision, commit, runs, data_root)
    if ray or ray_address:
        from fastweights.experiments.fan_out import LOCAL, fan_out  # deferred: only this needs it

        summary = fan_out(chosen, ledger, workspace, deadline, say, ray_address or LOCAL)
    else:
        with bars() as report:
            several = at_once or AT_ONCE.get(workspace.device.type, 1)
            summary = work.reproduce(chosen, ledger, workspace, deadline, say, _bar_of, report, several)
    say(f"{len(summary.finished)} runs finished, {summary.left} left, {time.monotonic() - started:.0f} s")
    if not summary.finished and not summary.left:
        say(f"All of them are in {ledger} already; to run them yourself, name a ledger of your own with --ledger.")
    if summary.failed:
        raise UserError(f"{len(summary.failed)} runs failed, the first of them {summary.failed[0]}")
    if summary.unfinished is not None and time.monotonic() < deadline:
        raise typer.Exit(130)  # not the clock: Ctrl-C


def search(
    file: Annotated[
        Path,
        typer.Argument(
            help='A JSON list of {"name": ..., "cell": ..., "training": {...}, "learner": {...}}: what is special, '
            'mini-imagenet-5way-1shot/fwcnn-hebb, say, and changes to its settings by a recipe ("recipe", best unless '
            "said)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The record to add to.")] = SEARCH,
    data_root: RootOption = None,
    runs: Annotated[Path, typer.Option(help="Folder of checkpoints and logs.")] = Path("runs/reproduce"),
    commit: CommitOption = "",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Compare configurations on validation tasks; the test split is not touched."""
    candidates = searching.read_candidates(file)
    workspace = _workspace(device, precision, commit, runs, data_root)
    with bars() as report:
        done = searching.search(candidates, out, workspace, say, lambda candidate: _bar(candidate.name), report)
    if done < len(candidates):
        say(f"Stopped with {len(candidates) - done} candidates left; the same command goes on.")
        raise typer.Exit(130)


def _workspace(device: str, precision: str, commit: str, runs: Path, data_root: Path | None) -> Workspace:
    where = find_device(device)
    return Workspace(where, choose_precision(precision, where), find_commit(commit), runs, data_root)


def _bar_of(run: Run) -> list[Sink]:
    return _bar(str(run))


def _bar(title: str) -> list[Sink]:
    """A progress bar, where somebody watches; a file of output is better off without."""
    return [ProgressBar(console, title)] if console.is_terminal else []


def parse_time(text: str) -> float:
    """90s, 9m, 2h or plain seconds, in seconds; nothing is for ever."""
    if not text:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found:
        raise UserError(f"--budget is a time such as 90s, 9m or 2h, not {text!r}.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _print_plan(chosen: list[Run], ledger: Path) -> None:
    lines = ledgers.read(ledger)
    todo = missing(chosen, {line.key for line in lines})
    times = {run: estimate(run, lines) for run in todo}
    for number, (run, seconds) in enumerate(times.items(), 1):
        say(f"{number:4} {'unknown' if seconds is None else f'{seconds:,.0f} s':>8}  {run}")
    known = [seconds for seconds in times.values() if seconds is not None]
    say(
        f"{len(todo)} of {len(chosen)} runs are missing; {len(known)} of them take about {sum(known) / 60:,.0f} min, "
        "by the quickest run of the same model in the ledger."
    )


@results.command("merge")
def merge(
    file: Annotated[Path, typer.Argument(help="A ledger that was written elsewhere; its details lie beside it.")],
    ledger: LedgerOption = LEDGER,
) -> None:
    """Take in the lines of another ledger."""
    merged = ledgers.merge(ledger, file)
    say(f"{merged.added} lines added to {ledger}, {merged.known} were there already.")
    for name in merged.refused:
        say(f"Left out: {name} is there with another number, and the first one counts.")


@results.command("retire")
def retire(
    cell: Annotated[str, typer.Argument(help="For example mini-imagenet-5way-1shot/fwcnn-hebb/truncated.")],
    recipe: Annotated[str, typer.Option(help="Only runs by this recipe.")] = "best",
    ledger: LedgerOption = LEDGER,
) -> None:
    """Move a cell's lines to the retired ones beside the ledger, so that it is run again after its recipe changed."""
    wanted = parse_cell(cell)
    lines = [
        line
        for line in ledgers.read(ledger)
        if (parse_experiment(line.experiment).training, line.learner, line.variant) == wanted and line.recipe == recipe
    ]
    if not lines:
        raise UserError(f"{ledger} holds no run of {cell} by the recipe {recipe}.")
    say(f"{len(lines)} lines moved to {ledgers.retire(ledger, lines)}.")


def report(
    check: Annotated[
        bool, typer.Option("--check", help="Only check that every written file is what the ledger says.")
    ] = False,
    ledger: LedgerOption = LEDGER,
    model: Annotated[
        Path | None, typer.Option(help="A model with fast weights: draw one test task in its memory, too.")
    ] = None,
    data_root: RootOption = None,
) -> None:
    """Write the paper's numbers beside ours: pages and csv files beside the ledger, and the front page's table."""
    if check:
        reports.check(ledger)
        return
    if model is not None:
        say(f"Drawn: {reports.draw_pca(model, ledger, data_root)}")
    for path in reports.write(ledger):
        say(f"Written: {path}")
