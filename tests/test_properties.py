"""Whatever they are given, readers and the Python interface answer: rightly, or with one sentence."""

import csv
import io
import json
import math
import string
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support import blobs
from tiny import small_settings

from fastweights import (
    Dataset,
    EpisodeSampler,
    EvaluationTasks,
    LearnerSettings,
    Training,
    TrainSettings,
    UserError,
    build_learner,
    evaluate,
    load,
    load_learner,
    load_state,
    preset,
    read_pictures,
    register,
    resume,
    save_state,
)
from fastweights.classifier.labels import Labels, Row
from fastweights.data import mini_imagenet, ptb
from fastweights.data.own import rows_of
from fastweights.data.sources import Files
from fastweights.training.logs import JsonlLog
from fastweights.utils.arguments import shown
from fastweights.utils.reading import parse_json

settings.register_profile("same every time", derandomize=True, database=None, deadline=None)
settings.load_profile("same every time")
few = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
many = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(-3, 12), st.sampled_from([10**30, -(2**63), True]))
ARRAYS = st.sampled_from([np.zeros((2, 2)), np.float64(5), np.int64(5), torch.zeros(2, 2), torch.tensor(5)])
JUNK = st.one_of(
    st.none(), NUMBERS, st.text(max_size=5), st.binary(max_size=5), ARRAYS, st.lists(st.integers(), max_size=3)
) | st.sampled_from([object(), {}, {"a": 1}, "5", 5.0, "a\0b", "\ud800", set(), print, Path("nowhere"), int])
"""What nobody should give, and some that might be right."""


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Nothing but one sentence is raised."""
    try:
        yield
    except UserError as error:
        said = str(error)
        assert said.strip(), "nothing was said"
        assert "\n" not in said, said
        assert len(said) < 2000, said


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def picture(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, kind)
    return out.getvalue()


PICTURES = [picture(kind) for kind in ("png", "jpeg", "gif", "bmp", "webp", "tiff")]


@st.composite
def damaged(draw: st.DrawFn, wholes: list[bytes]) -> bytes:
    """A file with some bytes changed, some taken out, or its end cut off."""
    data = bytearray(draw(st.sampled_from(wholes)))
    for place, value in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=8)):
        data[place] = value
    start, length = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 0, 1, 7, 10**6]))
    return bytes(data[:start] + data[start + length :])


# Readers


@many
@given(data=st.binary(max_size=200) | damaged(PICTURES))
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_a_picture_or_none(data):
    with folder() as place, in_a_sentence():
        (place / "x.png").write_bytes(data)
        assert read_pictures([place / "x.png"], (4, 6, 3)).shape == (1, 1, 4, 6, 3)


def packed(**entries: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.txt", data)
    return out.getvalue()


@many
@given(data=damaged([packed(a=b"ay" * 50, b=b"bee"), packed(**{"in/c": bytes(1000)})]))
@pytest.mark.filterwarnings("ignore")
def test_any_archive_is_read_or_refused(data):
    with folder() as place, in_a_sentence():
        (place / "x.zip").write_bytes(data)
        with Files([place]) as files:
            for name in files.names:
                assert name.startswith(str(place))
                files.read(name)


TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from(list('",\n\r\t\0 {}[]')), max_size=60)


@many
@given(content=st.binary(max_size=60) | TEXTS.map(str.encode), ending=st.sampled_from(["csv", "tsv", "jsonl", "txt"]))
def test_any_table_of_texts_is_read_or_refused(content, ending):
    with folder() as place, in_a_sentence():
        (place / f"x.{ending}").write_bytes(b"text,label\n" + content if ending == "csv" else content)
        for line, row in rows_of(place / f"x.{ending}", ("text",)):
            assert line >= 1
            assert isinstance(row, dict)


WORDS = st.text(string.ascii_letters + " ,\"'äß漢", min_size=1, max_size=20)


@few
@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=8))
def test_tables_of_texts_come_back_as_they_were_written(rows):
    with folder() as place:
        table = io.StringIO()
        csv.writer(table).writerows([("text", "label"), *rows])
        (place / "x.csv").write_text(table.getvalue())
        (place / "x.jsonl").write_text("\n".join(json.dumps({"text": t, "label": label}) for t, label in rows))
        for name in ("x.csv", "x.jsonl"):
            found = [(row["text"], row["label"]) for _, row in rows_of(place / name, ("text", "label"))]
            assert found == rows


LABELLED = st.fixed_dictionaries({"text": JUNK | st.just("some words"), "label": JUNK}, optional={"split": JUNK})


@few
@given(rows=st.lists(LABELLED, max_size=8))
def test_any_labelled_texts_become_a_dataset_or_a_sentence(rows):
    def written(row: dict) -> str:
        return json.dumps(row, default=str)

    with folder() as place, in_a_sentence():
        (place / "x.jsonl").write_text("\n".join(map(written, rows)))
        dataset = load(place / "x.jsonl", place / "root")
        assert set(dataset.splits) == {"train", "val", "test"}


@few
@given(data=st.binary(max_size=100) | TEXTS.map(str.encode), split=st.sampled_from(["train", "val", "test"]))
def test_any_file_of_a_benchmark_is_read_or_refused(data, split):
    with in_a_sentence():
        mini_imagenet._read_listing(b"filename,label\n" + data, "x.csv", split)
    with in_a_sentence():
        ptb.parse(data, "x.txt", "train")


@many
@given(text=st.text(max_size=30) | st.sampled_from(["[" * 10**5, '{"a":' * 10**5, "9" * 5000, "NaN", '"\\ud800"']))
def test_json_is_parsed_or_a_value_error(text):
    with suppress(ValueError):
        parse_json(text)


EVENTS = st.lists(st.tuples(st.sampled_from(["train", "validation", "test"]), st.integers(0, 5)), max_size=10)


@many
@given(before=EVENTS, after=EVENTS, step=st.integers(0, 5), cut=st.integers(0, 40))
def test_a_resumed_log_has_each_event_once_and_in_order_of_writing(before, after, step, cut):
    with folder() as place:
        path = place / "log.jsonl"
        for events, at in ((dict.fromkeys(before), None), (dict.fromkeys(after), step)):
            log = JsonlLog(path, at)
            for event, number in events:
                log.write({"event": event, "step": number})
            log.close()
            if at is None:
                path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])
                whole = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        told = [(line["event"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]
        assert len(set(told)) == len(told)
        assert {*after} <= {*told}
        assert {(line["event"], line["step"]) for line in whole if line["step"] <= step} <= {*told}


NAMES = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(["\udce9", '"', "\n", ","]), min_size=1)


@many
@given(
    names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    top=st.integers(1, 2),
    kind=st.sampled_from(["csv", "jsonl"]),
)
def test_labels_go_on_where_they_stopped(names, top, kind):
    with folder() as place:
        path, likely = place / f"labels.{kind}", [("a", 0.75), ("b", 0.25)][:top]
        with Labels(path, top, resume=False) as labels:
            labels.write([Row(name, likely) for name in names])
        with path.open("ab") as file:
            file.write(b"half a li")
        with Labels(path, top, resume=True) as labels:
            assert labels.done == set(names)


# The Python interface


@pytest.fixture(scope="module")
def data() -> Dataset:
    splits = {name: blobs(12, 6, seed=seed) for seed, name in enumerate(("train", "val", "test"))}
    return Dataset("blobs", splits, "blobs")


@many
@given(way=JUNK, shot=JUNK, queries=JUNK, tasks=JUNK)
def test_tasks_are_what_was_asked_for_or_a_sentence(data, way, shot, queries, tasks):
    with in_a_sentence():
        EpisodeSampler(data.splits["train"], way, 1, 1)
    with in_a_sentence():
        EpisodeSampler(data.splits["train"], 5, shot, queries)
    with in_a_sentence():
        EvaluationTasks(data, "test", way=5, shot=shot, queries=1, tasks=tasks)
    if not isinstance(tasks, int) or tasks < 1000:
        with in_a_sentence():
            assert EpisodeSampler(data.splits["train"], 5, 1, 1).draw(tasks).tasks >= 1


@few
@given(way=st.integers(2, 12), shot=st.integers(1, 3), queries=st.integers(1, 3), tasks=st.integers(1, 5))
def test_a_task_has_distinct_classes_and_items(data, way, shot, queries, tasks):
    sampler = EpisodeSampler(data.splits["train"], way, shot, queries)
    positions = sampler.positions(tasks)
    assert all(len(set(task.flatten().tolist())) == way * (shot + queries) for task in positions)
    classes = data.splits["train"].classes_of(positions)
    assert (classes == classes[..., :1]).all()
    assert all(len(set(task[:, 0].tolist())) == way for task in classes)
    episode = sampler.episode(positions)
    assert episode.query_y[0].tolist() == [label for label in range(way) for _ in range(queries)]


@many
@given(one=JUNK, two=JUNK)
def test_whatever_is_named_is_found_or_a_sentence(data, one, two):
    name = one if not isinstance(one, (str, Path)) or not Path(str(one).replace("\0", "")).exists() else "nowhere"
    for ask in (
        lambda: load(name),
        lambda: load("omniglot", "nowhere", one),
        lambda: load("nowhere", one),
        lambda: read_pictures(one, (8, 8, 1)),
        lambda: read_pictures([name], (8, 8, 1)),
        lambda: read_pictures(["nowhere.png"], one),
        lambda: load_learner(name),
        lambda: load_state(name),
        lambda: resume(name, data),
        lambda: resume("nowhere", one),
        lambda: preset(one, dataset="", item_shape=(8, 8, 1), vocabulary=0, way=5, shot=1),
        lambda: preset("fwcnn-hebb", dataset="", item_shape=one, vocabulary=0, way=5, shot=1),
        lambda: preset("fwcnn-hebb", dataset="", item_shape=(8, 8, 1), vocabulary=one, way=two, shot=two),
        lambda: build_learner(one),
        lambda: Training(one, TrainSettings(), data),
        lambda: Training(LearnerSettings(), one, data),
        lambda: Training(LearnerSettings(), TrainSettings(), one),
        lambda: evaluate(one, data.splits["test"], two),
    ):
        with in_a_sentence():
            ask()
    with pytest.raises(UserError):
        register(two)(one)


@many
@given(
    value=JUNK,
    name=st.sampled_from(["way", "steps", "learning_rate", "augment", "optimizer", "seed", "pretrain_steps"]),
)
def test_settings_are_right_or_a_sentence(value, name):
    with in_a_sentence():
        made = TrainSettings(**{name: value})
        assert TrainSettings.from_json(json.loads(json.dumps(made.to_json()))) == made


@many
@given(value=JUNK, name=st.sampled_from(["system", "encoder", "item_shape", "slots", "filters", "width", "of_system"]))
def test_learner_settings_are_right_or_a_sentence(value, name):
    with in_a_sentence():
        made = LearnerSettings(**{name: value})
        assert LearnerSettings.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.fixture(scope="module")
def learner():
    torch.manual_seed(0)
    return build_learner(small_settings("fast-weights", item_shape=(8, 8, 1), slots=5)).eval().requires_grad_(False)


KINDS = st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn, *shapes: tuple[int, ...]) -> torch.Tensor:
    shape = draw(st.sampled_from(shapes) | st.lists(st.integers(0, 9), max_size=5).map(tuple))
    fill = draw(st.sampled_from([0, 1, 4, -1, 7, math.nan, math.inf]))
    kind = draw(KINDS)
    is_number = math.isfinite(fill) and (fill >= 0 or kind not in (torch.uint8, torch.bool))
    return torch.full(shape, fill if is_number or kind.is_floating_point else 0).to(kind)


@many
@given(
    x=tensors((2, 4, 8, 8, 1)) | JUNK,
    y=tensors((2, 4)) | JUNK | st.just(torch.arange(4).expand(2, 4)),
    way=st.none() | JUNK,
)
def test_a_task_is_described_or_a_sentence(learner, x, y, way):
    good = torch.zeros(2, 4, 8, 8, 1, dtype=torch.uint8)
    for items in (x, good):
        with in_a_sentence():
            state = learner.describe(items, y, way)
            assert learner.predict(state, good).isfinite().all()


@many
@given(part=st.sampled_from(["slots", "counts", "hidden.sums"]), value=tensors((2, 4), (2, 5, 36)) | JUNK, whole=JUNK)
def test_a_state_is_one_or_a_sentence(learner, part, value, whole):
    items = torch.zeros(2, 4, 8, 8, 1, dtype=torch.uint8)
    state = learner.describe(items, torch.arange(4).expand(2, 4))
    for wrong in (whole, {**state, part: value}):
        with in_a_sentence():
            assert learner.predict(wrong, items).isfinite().all()
        with in_a_sentence():
            learner.extend(wrong, items, torch.arange(4).expand(2, 4))
        with in_a_sentence():
            learner.forget(wrong, 1)
        with folder() as place, in_a_sentence():
            save_state(place / "x", wrong)
            assert load_state(place / "x").keys() == wrong.keys()
    with in_a_sentence():
        learner.forget(state, whole)


@many
@given(value=JUNK | st.integers(10**4000, 10**4001))
def test_anything_can_be_shown_on_a_line(value):
    assert 0 < len(shown(value)) < 100
    assert "\n" not in shown(value)
