"""The commands for pictures of one's own: `learn`, `predict`, `add`, `forget`, `inspect`, and `pack` for models."""

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fastweights.classifier import Classifier
from fastweights.classifier.estimator import SURE, Reading
from fastweights.classifier.folders import kind_of_pictures, labelled_pictures, pictures_in
from fastweights.classifier.labels import Labels, Row
from fastweights.classifier.memory import Label, listed
from fastweights.cli.common import load_dataset
from fastweights.cli.options import DeviceOption, RootOption
from fastweights.utils.console import bars, console, say
from fastweights.utils.errors import UserError
from fastweights.utils.files import taking_turns

UNKNOWN = "unknown"
"""What is written for a picture of none of the classes."""
AT_A_TIME = 512
"""Pictures answered before their labels are written."""
SHOWN = 20
"""Answers shown in the terminal; a file holds all of them."""

ClassifierArgument = Annotated[Path, typer.Argument(help="A classifier that `learn` made: icons.fw, say.")]
PicturesArgument = Annotated[list[Path], typer.Argument(help="Pictures, or folders of pictures.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse files that cannot be read instead of skipping.")]


def learn(
    examples: Annotated[
        Path,
        typer.Argument(help="A folder with a folder of pictures for each class, or with pictures named after theirs."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The classifier to write.")] = Path("classifier.fw"),
    model: Annotated[
        str, typer.Option(help="drawings, photos, a model.safetensors or a run; auto looks at the pictures.")
    ] = "auto",
    strict: StrictOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Make a classifier from your own pictures: one of each class is enough, and nothing is trained."""
    groups = labelled_pictures(examples)
    if model == "auto":
        model = kind_of_pictures([picture for pictures in groups.values() for picture in pictures])
        say(f"These look like {model}: using the model {model} (--model chooses another).")
    with _told() as told, bars() as report:
        classifier = Classifier(model, device=device, errors=_errors(strict), progress=report).fit(groups)
        told.reading = classifier.reading_
    classifier.save(out)
    _say_classes(classifier, out)
    say(f"Next: fastweights predict {out} PICTURES/")


def predict(
    classifier: ClassifierArgument,
    pictures: PicturesArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the labels to this .csv or .jsonl.")] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many likely classes to write for each.")] = 1,
    unknown: Annotated[
        bool, typer.Option("--unknown", help=f"Answer {UNKNOWN} for pictures of none of the classes.")
    ] = False,
    copy_to: Annotated[
        Path | None, typer.Option(help="Copy each picture into a folder of its label under this one.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the labels that --out already has.")] = False,
    strict: StrictOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Label pictures: file, label, confidence."""
    labeller = Classifier.load(classifier, device=device, errors=_errors(strict), progress=False)
    if unknown and UNKNOWN in labeller.classes_.tolist():
        raise UserError(f"{classifier} has a class called {UNKNOWN}; rename it, or leave out --unknown.")
    folders = None if copy_to is None else _folders(copy_to, labeller.classes_.tolist(), unknown)
    found = pictures_in(pictures)
    shown: list[Row] = []
    with Labels(out, top, resume=resume) as labels, _told() as told:
        left = [picture for picture in found if str(picture) not in labels.done]
        if len(left) < len(found):
            say(f"{len(found) - len(left):,} of {len(found):,} pictures have their label already.")
        with bars() as report:
            for first in range(0, len(left), AT_A_TIME):
                some = left[first : first + AT_A_TIME]
                rows = _answers(labeller, some, top, unknown)
                told.add(labeller.reading_)
                _copy(rows, folders)
                labels.write(rows)
                shown += rows[: SHOWN - len(shown)]
                report("labelling", min(first + AT_A_TIME, len(left)), len(left))
    if out is None:
        console.print(_answer_table(shown, top))
        if len(left) > SHOWN:
            say(f"... and {len(left) - SHOWN:,} more; -o labels.csv writes all of them.")
    else:
        say(f"Labels of {len(found) - len(told.skipped):,} pictures: {out}")
    if copy_to is not None:
        say(f"Sorted copies: {copy_to}")


def add(
    classifier: ClassifierArgument,
    label: Annotated[str, typer.Argument(help="The class, new or known.")],
    pictures: PicturesArgument,
    strict: StrictOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Add examples of a class, new or known, to a classifier."""
    with taking_turns(classifier.resolve().parent):
        grown = Classifier.load(classifier, device=device, errors=_errors(strict), progress=False)
        with _told() as told:
            grown.add(label, pictures_in(pictures))
            told.reading = grown.reading_
        grown.save(classifier)
    _say_classes(grown, classifier)


def forget(
    classifier: ClassifierArgument,
    labels: Annotated[list[str], typer.Argument(help="The classes to forget; with --example, the examples.")],
    example: Annotated[
        bool, typer.Option("--example", help="Forget single examples, by the names in inspect.")
    ] = False,
) -> None:
    """Forget classes, or single examples, as if they had never been there."""
    with taking_turns(classifier.resolve().parent):
        shrunk = Classifier.load(classifier, progress=False)
        for label in labels:
            if example:
                shrunk.forget_example(label)
            else:
                shrunk.forget(_as_known(label, shrunk.memory_.labels))
        if not len(shrunk.memory_):
            raise UserError(f"nothing would be left in {classifier}; delete the file instead.")
        shrunk.save(classifier)
    _say_classes(shrunk, classifier)


def inspect(
    classifier: ClassifierArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw which classes are alike: a .png, .jpg, .svg or .pdf.")
    ] = None,
    examples: Annotated[bool, typer.Option("--examples", help="List the examples of each class, too.")] = False,
) -> None:
    """Show what a classifier knows: classes, examples, and which classes are hard to tell apart."""
    from fastweights.classifier.inspection import draw, inspected  # deferred: draws

    looked_at = Classifier.load(classifier, progress=False)
    found = inspected(looked_at.memory_)
    name = looked_at._model.name if looked_at._model is not None else "embeddings"
    table = Table(title=f"{len(looked_at.classes_)} classes seen by {name}", title_justify="left")
    table.add_column("class")
    table.add_column("examples", justify="right")
    table.add_column("recognised", justify="right")
    table.add_column("taken for")
    for one in found.classes:
        right = "" if one.recognised is None else f"{100 * one.recognised:.0f} %"
        table.add_row(
            Text(str(one.label)), str(one.examples), right, Text(listed(one.taken_for, 3) if one.taken_for else "")
        )
    console.print(table)
    if found.accuracy is None:
        say("Each class has one example: show more to see how well they are told apart.")
    else:
        say(f"Each example asked without itself: {100 * found.accuracy:.1f} % of {found.asked} are recognised.")
    if found.alike:
        pairs = ", ".join(f"{a} and {b} ({similarity:.2f})" for a, b, similarity in found.alike)
        say(f"Most alike: {pairs}.")
    if examples:
        for one in found.classes:
            say(f"{one.label}: {', '.join(one.names)}")
    if out is not None:
        draw(found, out)
        say(f"Picture: {out}")


def pack(
    run: Annotated[Path, typer.Argument(help="A trained model, or the folder of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The model to write.")],
    twin: Annotated[
        Path | None, typer.Option(help="A run like it that was not trained on validation and test classes.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Add what was measured to this .jsonl.")] = None,
    data_root: RootOption = None,
) -> None:
    """Make a trained model ready for `learn`: half precision, calibrated on held-out classes."""
    import json

    from fastweights.classifier import packing
    from fastweights.learners.saved import MODEL, load
    from fastweights.utils.files import append_lines

    of = load(run / MODEL if run.is_dir() else run).training
    data = load_dataset(str(of["dataset"]), data_root, str(of.get("variant", "")))
    with bars() as report:
        line = packing.pack(run, twin, out, data, report)
    if record is not None:
        append_lines(record, [json.dumps(line)])
    of_classes, held_out = line["held_out"]["classes"], line["held_out"]
    say(
        f"{out}: {line['bytes'] / 1e6:.1f} MB. On {of_classes} held-out classes, five at a time, one example each: "
        f"{held_out['5way_1shot']} % right; calibration error {held_out['ece']} (before {held_out['ece_before']}); "
        f"known from unknown, AUROC {held_out['auroc']} (before {held_out['auroc_before']})."
    )


class Told:
    """What is said once at the end of reading pictures."""

    def __init__(self) -> None:
        self.reading: Reading | None = None

    def add(self, reading: Reading) -> None:
        before = self.reading or Reading()
        before.pictures += reading.pictures
        before.on_dark += reading.on_dark
        before.skipped |= reading.skipped
        self.reading = before

    @property
    def skipped(self) -> dict[str, str]:
        return {} if self.reading is None else self.reading.skipped


@contextmanager
def _told() -> Iterator[Told]:
    """Warnings as sentences, each once, and what was noticed about the pictures."""
    told = Told()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    reading = told.reading
    if reading is not None and reading.pictures:
        polarity = {0: "dark on light", reading.pictures: "light on dark"}.get(reading.on_dark)
        say(
            f"Read {reading.pictures:,} picture{'s' * (reading.pictures > 1)}, "
            + (f"{polarity}." if polarity else f"{reading.on_dark:,} of them light on dark.")
        )
    for sentence in dict.fromkeys(str(one.message) for one in caught):
        say(f"Note: {sentence}")


def _errors(strict: bool) -> str:
    return "raise" if strict else "skip"


def _answers(classifier: Classifier, pictures: Sequence[Path], top: int, unknown: bool) -> list[Row]:
    """Rows for the pictures that could be read."""
    chances, known = classifier.predict_all(list(pictures))
    names = classifier.classes_.tolist()
    rows = []
    for picture, row, sure in zip(pictures, chances, known, strict=True):
        if row[0] != row[0]:  # NaN: it could not be read
            continue
        order = (-row).argsort(kind="stable")[:top]
        likely = [(str(names[place]), float(row[place])) for place in order]
        if unknown and sure < SURE:
            likely = [(UNKNOWN, 1 - float(sure)), *likely][:top]
        rows.append(Row(str(picture), likely))
    return rows


def _folders(root: Path, labels: Sequence[Label], unknown: bool) -> dict[str, Path]:
    """The folder of each label."""
    names = [str(label) for label in labels] + ([UNKNOWN] if unknown else [])
    for name in names:
        if name in ("", ".", "..") or any(mark in name for mark in "/\\\0") or name.strip() != name:
            raise UserError(f"the class {name!r} cannot be the name of a folder; rename it, or leave out --copy-to.")
    return {name: root / name for name in names}


def _copy(rows: Sequence[Row], folders: dict[str, Path] | None) -> None:
    for row in rows if folders else ():
        assert folders is not None
        source, folder = Path(row.file), folders[row.likely[0][0]]
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / source.name
        number = 1
        while target.exists() and target.read_bytes() != source.read_bytes():
            number += 1
            target = folder / f"{source.stem}-{number}{source.suffix}"
        if not target.exists():
            shutil.copy2(source, target)


def _as_known(label: str, known: Sequence[Any]) -> Any:
    """A class as it was typed: classes that are numbers are typed as texts."""
    return next((one for one in known if str(one) == label), label)


def _say_classes(classifier: Classifier, path: Path) -> None:
    counts = classifier.memory_.counts
    each = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    plural = "example" if each == "1" else "examples"
    say(f"{path}: {len(counts):,} classes of {each} {plural} each: {listed(classifier.memory_.labels)}.")


def _answer_table(rows: Sequence[Row], top: int) -> Table:
    table = Table()
    table.add_column("file")
    for place in range(top):
        table.add_column("label" if place == 0 else f"label {place + 1}")
        table.add_column("confidence", justify="right")
    for row in rows:
        cells: list[Any] = [Text(row.file)]
        for label, chance in row.likely:
            cells += [Text(label), f"{chance:.2f}"]
        table.add_row(*cells)
    return table
