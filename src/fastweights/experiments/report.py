"""The report as files: both forms of it beside the ledger, and the table on the project's front page.

All numbers of ours in its tables come out of the ledger, none is typed by hand.
"""

from pathlib import Path

from fastweights.errors import UserError
from fastweights.experiments import figures, ledger, search
from fastweights.experiments.compare import by_group
from fastweights.experiments.contents import Results, contents, summary
from fastweights.experiments.pages import to_html, to_markdown
from fastweights.files import read_text, replacing

README, PAGE, NOTES, PCA = "README.md", "report.html", "notes.md", "task-pca.svg"
"""What lies beside the ledger: two forms of the report, what is written by hand, and one drawing."""
OURS = "`fastweights report`"
"""What is in every report."""
BEGIN, END = "<!-- table: written by fastweights report -->", "<!-- end of table -->"
"""What the summary on the front page stands between."""


def read_results(ledger_path: Path) -> Results:
    _require(ledger_path)
    lines, details = ledger.read(ledger_path), ledger.read_details(ledger_path)
    ledger.require_details(lines, details)
    beside = {name: ledger_path.parent / name for name in (NOTES, PCA)}
    texts = {name: read_text(path) if path.exists() else "" for name, path in beside.items()}
    tried = tuple(search.read(ledger_path.parent / search.SEARCH))
    return Results(tuple(lines), by_group(lines), details, texts[NOTES], texts[PCA], tried)


def _require(ledger_path: Path) -> None:
    """A report of a ledger whose name was misspelt would put "not yet run" in the place of every number."""
    if not ledger_path.exists():
        raise UserError(f"{ledger_path} does not exist; name the ledger, or begin one with fastweights reproduce.")


def write(ledger_path: Path) -> tuple[Path, ...]:
    """Write both forms beside the ledger, and the summary on the project's front page, where there is one."""
    results = read_results(ledger_path)
    blocks = contents(results)
    readme = ledger_path.parent / README
    if readme.exists() and OURS not in read_text(readme):
        raise UserError(f"{readme} was not written by fastweights report; move it, or the ledger, elsewhere.")
    texts = {
        ledger_path.parent / README: to_markdown(blocks),
        ledger_path.parent / PAGE: to_html(blocks, "fastweights: results"),
        **front_page(ledger_path, results),
    }
    for path, text in texts.items():
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return tuple(texts)


def check(ledger_path: Path) -> None:
    """Refuse a README that is not what the ledger says."""
    readme = ledger_path.parent / README
    if not readme.exists():
        raise UserError(f"{readme} does not exist; write it with fastweights report.")
    results = read_results(ledger_path)
    for path, text in {readme: to_markdown(contents(results)), **front_page(ledger_path, results)}.items():
        found, right = read_text(path).splitlines(), text.splitlines()
        if found != right:
            pairs = zip(found, right, strict=False)
            line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), min(len(found), len(right)) + 1)
            raise UserError(
                f"{path} and {ledger_path} disagree, first in line {line}; write it anew with fastweights report."
            )


def front_page(ledger_path: Path, results: Results) -> dict[Path, str]:
    """The README above the ledger's folder, with our numbers between its marks; empty where none has such marks."""
    path = ledger_path.resolve().parent.parent / README
    text = read_text(path) if path.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return {path: f"{before}{begin}\n\n{to_markdown([summary(results)])}\n{end}{after}"} if end else {}


def draw_pca(model: Path, ledger_path: Path, data_root: Path | None) -> Path:
    """Draw one test task of a model, to be shown by every report from now on."""
    import torch

    from fastweights import checkpoint
    from fastweights.data import load
    from fastweights.episodes import EpisodeSampler
    from fastweights.training import MODEL

    _require(ledger_path)
    learner, saved = checkpoint.load_learner(model / MODEL if model.is_dir() else model)
    s = saved.training
    dataset = load(s.dataset, data_root, s.variant)
    sampler = EpisodeSampler(dataset.splits["test"], s.way, s.shot, s.queries)
    about = f"{dataset.full_name}, {s.way}-way {s.shot}-shot, {saved.learner.rule}"
    svg = figures.task_pca(learner, sampler.draw(1, torch.Generator().manual_seed(0)), about)
    path = ledger_path.parent / PCA
    with replacing(path) as draft:
        draft.write_text(svg, encoding="utf-8")
    return path
