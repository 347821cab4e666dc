"""The commands for data of one's own: `learn`, `predict`, `add`, `forget`, `inspect`, `export`, `pack`."""

import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fastweights.classifier import Classifier
from fastweights.classifier.adapter import is_adapter
from fastweights.classifier.answers import SURE
from fastweights.classifier.encoders import UNASKED
from fastweights.classifier.estimator import Reading
from fastweights.classifier.folders import kind_of_pictures, labelled_pictures, pictures_in
from fastweights.classifier.labels import Labels, Row
from fastweights.classifier.memory import Label, listed
from fastweights.classifier.texts import NAME, is_texts, labelled_texts, texts_in
from fastweights.cli.common import load_dataset
from fastweights.cli.options import DeviceOption, RootOption
from fastweights.utils.console import bars, console, say
from fastweights.utils.errors import UserError
from fastweights.utils.files import picture_format, taking_turns

UNKNOWN = "unknown"
"""What is written for a picture of none of the classes."""
AT_A_TIME = 512
"""Pictures answered before their labels are written."""
SHOWN = 20
"""Answers shown in the terminal; a file holds all of them."""
SUFFIX = ".fw"
LONGEST = 255
"""Bytes of the name of a file, or of a folder."""

ClassifierArgument = Annotated[Path, typer.Argument(help="A classifier that `learn` made: icons.fw, say.")]
PicturesArgument = Annotated[
    list[Path], typer.Argument(help="Pictures, or folders of pictures; for texts, files of these: .csv, .jsonl, .txt.")
]
EncoderOption = Annotated[
    str | None, typer.Option(help="What turns pictures or texts into vectors: my_file.py:function, of a list of them.")
]
CacheOption = Annotated[
    Path | None, typer.Option(help="Keep an encoder's vectors in this folder: asked once per item.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse files that cannot be read instead of skipping.")]
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        help="Set how sure to be on other examples with labels, laid out alike; labels of no class are strangers."
    ),
]


def learn(
    examples: Annotated[
        Path,
        typer.Argument(
            help="A folder with a folder of pictures for each class, or with pictures named after theirs; or a file of "
            "texts with the columns text and label."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The classifier to write.")] = Path("classifier.fw"),
    model: Annotated[
        str, typer.Option(help="drawings, photos, texts, a model.safetensors or a run; auto looks at the pictures.")
    ] = "auto",
    encoder: EncoderOption = None,
    cache: CacheOption = None,
    calibrate: CalibrateOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a classifier that is there already.")] = False,
    strict: StrictOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Make a classifier from your own pictures or texts: one of each class is enough, and nothing is trained."""
    if out.suffix.lower() != SUFFIX or out.is_dir():  # before anything is read; pictures are not overwritten by mistake
        raise UserError(f"{out} cannot be written: a classifier goes to a file that ends in {SUFFIX}.")
    if out.exists() and not force:
        raise UserError(f"{out} exists already; add to it with `fastweights add`, or replace it with --force.")
    of_texts = is_texts(examples)
    groups, others = _labelled(examples), None if calibrate is None else _labelled(calibrate)
    seen_by = model if model != "auto" else None if encoder else NAME if of_texts else model
    if not encoder and is_adapter(seen_by):
        raise UserError(
            f"{seen_by} is an adapter, which goes above an encoder; give --encoder my_file.py:function, too."
        )
    if seen_by == "auto":
        seen_by = kind_of_pictures([picture for pictures in groups.values() for picture in pictures])
        say(f"These look like {seen_by}: using the model {seen_by} (--model chooses another).")
    with _told() as told, bars() as report:
        how: dict[str, Any] = {"device": device, "errors": _errors(strict), "progress": report}
        classifier = Classifier(seen_by, encoder=encoder, cache=cache, **how).fit(groups)
        told.add(classifier)
        if others is not None:
            classifier.calibrate(others)
            told.add(classifier)
    classifier.save(out)
    _say_classes(classifier, out)
    if others is not None:
        on = classifier.calibrated_
        say(
            f"Calibrated on {on.items:,} other {classifier._sight.item}s of these classes, {100 * on.right:.0f} % of "
            f"which are answered rightly, at a mean confidence of {on.confidence:.2f}; strangers: {on.strangers:,}."
        )
    seen_again = f" --encoder {encoder}" if encoder else ""
    say(f"Next: fastweights predict {out} {'TEXTS.csv' if of_texts else 'PICTURES/'}{seen_again}")


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
    encoder: EncoderOption = None,
    cache: CacheOption = None,
    strict: StrictOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Label pictures or texts: file or text, label, confidence."""
    labeller = _seeing(classifier, device, strict, encoder, cache)
    if unknown and UNKNOWN in labeller.classes_.tolist():
        raise UserError(f"{classifier} has a class called {UNKNOWN}; rename it, or leave out --unknown.")
    folders = None if copy_to is None else _folders(copy_to, labeller.classes_.tolist(), unknown)
    found = _inputs(labeller, pictures)
    if copy_to is not None:
        if any(isinstance(one, str) for one in found):
            raise UserError("texts are no files that could be copied; leave out --copy-to.")
        copied = {folder.resolve() for folder in (folders or {}).values()}
        found = [picture for picture in found if copied.isdisjoint(picture.resolve().parents)]  # no copies of before
        if not found:
            raise UserError(f"all of these pictures lie in folders of {copy_to} already; name others.")
    called = "texts" if any(isinstance(one, str) for one in found) else "pictures"
    shown: list[Row] = []
    answered = 0
    of = "text" if called == "texts" else "file"
    with Labels(out, top, resume=resume, of=of) as labels, _told() as told:
        left = [picture for picture in found if str(picture) not in labels.done]
        if len(left) < len(found):
            say(f"{len(found) - len(left):,} of {len(found):,} {called} have their label already.")
        with bars() as report:
            for first in range(0, len(left), AT_A_TIME):
                some = left[first : first + AT_A_TIME]
                rows = _answers(labeller, some, top, unknown)
                told.add(labeller)
                _copy(rows, folders)
                labels.write(rows)
                shown += rows[: SHOWN - len(shown)]
                answered += len(rows)
                report("labelling", min(first + AT_A_TIME, len(left)), len(left))
    if left and not answered:
        which = f"none of the {len(left):,} {called}" if len(left) > 1 else f"no {of}"
        raise UserError(f"{which} can be read; name others.")
    if out is None:
        console.print(_answer_table(shown, top, of))
        if answered > SHOWN:
            say(f"... and {answered - SHOWN:,} more; -o labels.csv writes all of them.")
    else:
        say(f"Labels of {len(found) - len(left) + answered:,} {called}: {out}")
    if copy_to is not None and answered:
        say(f"Sorted copies: {copy_to}")


def add(
    classifier: ClassifierArgument,
    label: Annotated[str, typer.Argument(help="The class, new or known.")],
    pictures: PicturesArgument,
    encoder: EncoderOption = None,
    cache: CacheOption = None,
    strict: StrictOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Add examples of a class, new or known, to a classifier."""
    if not label.strip():
        raise UserError("the class has no name; give it one.")
    with _alone_with(classifier) as path:
        grown = _seeing(classifier, device, strict, encoder, cache)
        with _told() as told:
            grown.add(_as_known(label, grown.memory_.labels), _inputs(grown, pictures))
            told.add(grown)
        grown.save(path)
    _say_classes(grown, classifier)


def forget(
    classifier: ClassifierArgument,
    labels: Annotated[list[str], typer.Argument(help="The classes to forget; with --example, the examples.")],
    example: Annotated[
        bool, typer.Option("--example", help="Forget single examples, by the names in inspect.")
    ] = False,
) -> None:
    """Forget classes, or single examples, as if they had never been there."""
    with _alone_with(classifier) as path:
        shrunk = Classifier.load(classifier, encoder=UNASKED, progress=False)
        for label in labels:
            if example:
                shrunk.forget_example(label)
            else:
                shrunk.forget(_as_known(label, shrunk.memory_.labels))
        if not len(shrunk.memory_):
            raise UserError(f"nothing would be left in {classifier}; delete the file instead.")
        shrunk.save(path)
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

    if out is not None:
        picture_format(out)  # before anything is computed
    looked_at = Classifier.load(classifier, encoder=UNASKED, progress=False)
    found = inspected(looked_at.memory_, looked_at._refined.of(looked_at.memory_))
    name = looked_at._sight.name
    table = Table(title=f"{_classes(len(looked_at.classes_))} seen by {name}", title_justify="left")
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


def export(
    classifier: ClassifierArgument,
    out: Annotated[Path, typer.Argument(help="The .onnx file to write.")],
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Only what turns pixels into keys; the memory is yours to keep.")
    ] = False,
) -> None:
    """Write a classifier as ONNX: pixels in, probabilities out, the names of its classes along."""
    from fastweights.classifier.export import export as write  # deferred: imports torch's exporter

    if out.suffix.lower() != ".onnx":
        raise UserError(f"{out} cannot be written: the name of an ONNX graph ends in .onnx.")
    exported = Classifier.load(classifier, encoder=UNASKED, progress=False)
    write(exported, out, memory=not no_memory)
    what = "its encoder" if no_memory else f"{len(exported.classes_):,} classes"
    say(f"{out}: {what}, {out.stat().st_size / 1e6:.1f} MB.")


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
    if "dataset" not in of:
        raise UserError(f"{run} does not say what it was trained on; name a model that `fastweights train` made.")
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
    """What is said once, at the end of reading pictures."""

    def __init__(self) -> None:
        self.reading = Reading()
        self.sees_ink = False

    def add(self, classifier: Classifier) -> None:
        """What a classifier noticed about the pictures it has just read."""
        all_of_them, these = self.reading, classifier.reading_
        all_of_them.pictures += these.pictures
        all_of_them.photos += these.photos
        all_of_them.on_dark += these.on_dark
        model = classifier._model
        self.sees_ink = model is not None and (model.preparation.kind == "ink" or model.preparation.bright_ink)

    def __str__(self) -> str:
        pictures, on_dark = self.reading.pictures, self.reading.on_dark
        many = f"Read {pictures:,} picture{'s' * (pictures > 1)}"
        if not self.sees_ink or 2 * self.reading.photos > pictures:
            return f"{many}."
        polarity = {0: "dark on light", pictures: "light on dark"}.get(on_dark)
        return f"{many}, {polarity or f'{on_dark:,} of them light on dark'}."


@contextmanager
def _told() -> Iterator[Told]:
    """Say how many pictures were read and what is odd about them, each thing once, though many batches may be odd."""
    told = Told()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about tags and sizes: harmless
        yield told
    if told.reading.pictures:
        say(str(told))
    for sentence in _added_up([str(one.message) for one in caught], told.reading.pictures):
        say(f"Note: {sentence}")


def _added_up(sentences: Sequence[str], pictures: int) -> Iterator[str]:
    """Sentences about "2 of 512 pictures" of several batches as one about all pictures; others as they are, once."""
    about_some = re.compile(r"\b(\d+) of \d+ pictures?\b")
    counts: Counter[tuple[str, ...]] = Counter()
    for sentence in sentences:
        before, *rest = about_some.split(sentence, maxsplit=1)
        counts[before, *rest[1:]] += int(rest[0]) if rest else 1
    for parts, count in counts.items():
        of = f"{count:,} of {pictures:,} picture{'s' * (pictures > 1)}"
        yield of.join(parts)


@contextmanager
def _alone_with(classifier: Path) -> Iterator[Path]:
    """The file to be read and written again, links followed, while no other process does the same."""
    path = classifier.resolve()
    if not path.is_file():
        Classifier.load(classifier)  # says what is wrong; nothing is made where there was nothing
    with taking_turns(path.parent):
        yield path


def _seeing(path: Path, device: str, strict: bool, encoder: str | None, cache: Path | None) -> Classifier:
    """A classifier of pictures, or of texts."""
    how: dict[str, Any] = {"device": device, "errors": _errors(strict), "progress": False}
    found = Classifier.load(path, encoder=encoder, cache=cache, **how)
    if hasattr(found, "n_features_in_"):  # scikit-learn's name for the length of embeddings
        raise UserError(f"{path} knows embeddings, not pictures; use it from Python: Classifier.load({str(path)!r}).")
    return found


def _labelled(path: Path) -> Mapping[str, Sequence[Any]]:
    """The pictures or the texts of each class."""
    return labelled_texts(path) if is_texts(path) else labelled_pictures(path)


def _inputs(classifier: Classifier, paths: Sequence[Path]) -> list[Any]:
    """The pictures or the texts that are named, whichever a classifier sees."""
    sight = classifier._sight
    sees_texts = sight.item == "text" or (sight.model is None and all(map(is_texts, paths)))
    return list(texts_in(paths) if sees_texts else pictures_in(paths))


def _errors(strict: bool) -> str:
    return "raise" if strict else "skip"


def _answers(classifier: Classifier, pictures: Sequence[Any], top: int, unknown: bool) -> list[Row]:
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
        odd = name in ("", ".", "..") or any(mark in name for mark in "/\\\0") or name.strip() != name
        if odd or len(os.fsencode(name)) > LONGEST:
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
            draft = target.with_name(f".{target.name}.draft")
            shutil.copy2(source, draft)
            draft.replace(target)


def _as_known(label: str, known: Sequence[Any]) -> Any:
    """A class as it was typed: classes that are numbers are typed as texts."""
    return next((one for one in known if str(one) == label), label)


def _say_classes(classifier: Classifier, path: Path) -> None:
    counts = classifier.memory_.counts
    examples = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    of_each = f"{examples} example{'s' * (examples != '1')}{' each' * (len(counts) > 1)}"
    say(f"{path}: {_classes(len(counts))} of {of_each}: {listed(classifier.memory_.labels)}.")


def _classes(count: int) -> str:
    return f"{count:,} class{'es' * (count != 1)}"


def _answer_table(rows: Sequence[Row], top: int, of: str) -> Table:
    table = Table()
    table.add_column(of, overflow="fold")
    for place in range(top):
        table.add_column("label" if place == 0 else f"label {place + 1}")
        table.add_column("confidence", justify="right")
    for row in rows:
        cells: list[Any] = [Text(row.file)]
        for label, chance in row.likely:
            cells += [Text(label), f"{chance:.2f}"]
        table.add_row(*cells)
    return table
