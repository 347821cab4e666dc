"""The command `oracle`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.experiments import LEDGER, CommitOption, LedgerOption
from fastweights.cli.options import DeviceOption, PrecisionOption, RootOption, with_options
from fastweights.experiments.oracle import OracleSettings, run_oracle
from fastweights.experiments.run import Workspace, find_commit
from fastweights.utils.console import bars, say
from fastweights.utils.devices import find_device
from fastweights.utils.precision import choose_precision


@with_options(OracleSettings)
def oracle(
    data_root: RootOption = None,
    ledger: LedgerOption = LEDGER,
    runs: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = Path("runs/reproduce"),
    commit: CommitOption = "",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    *,
    given: dict[str, Any],
) -> None:
    """Train a language model on all words of Penn Treebank and let it answer the test tasks: an upper bound."""
    where = find_device(device)
    workspace = Workspace(where, choose_precision(precision, where), find_commit(commit), runs, data_root)
    with bars() as report:
        lines = run_oracle(OracleSettings(**given), ledger, workspace, say, report)
    for line in lines:
        say(f"{line.name}: {line.test_accuracy:.2f} ± {line.test_ci95:.2f} %")
    if not lines:
        say(f"All of it is in {ledger} already; to run it yourself, name a ledger of your own with --ledger.")
