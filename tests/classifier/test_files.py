"""A classifier on disk: equal answers afterwards; whatever is cut off, altered or made up is refused by name."""

import errno
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import clone
from torch import Tensor

from fastweights import Classifier
from fastweights.classifier import files
from fastweights.classifier.calibration import Calibration
from fastweights.classifier.errors import InputError
from fastweights.classifier.models import find_model
from fastweights.learners.base import KeyLearner
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.nn.encoders import CNN
from fastweights.utils.errors import UserError

from .drawn import SHAPES, TINY, drawing, write_model

Pictures = dict[str, list[str]]
QUERIES = [drawing(name, 2) for name in sorted(SHAPES)]


class Own(KeyLearner):
    """A learner that nobody has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = CNN((28, 28, 1), filters=8)


def made(kind: str, shipped: Path, tmp_path: Path) -> tuple[Classifier, Any]:
    """A classifier without examples, and the model that loading it needs."""
    torch.manual_seed(1)
    if kind == "shipped":
        return Classifier("drawings"), None
    if kind == "a file":
        return Classifier(write_model(tmp_path / "other.safetensors", seed=2)), None
    if kind == "a learner":
        return Classifier(build_learner(TINY)), None
    own = Own().eval()
    return Classifier(own), own


@pytest.mark.parametrize("kind", ["shipped", "a file", "a learner", "an unregistered learner"])
def test_a_classifier_answers_as_before(kind: str, shipped: Path, pictures: Pictures, tmp_path: Path) -> None:
    model, given = made(kind, shipped, tmp_path)
    model.fit(pictures).add("wave", drawing("wave")).forget("step")
    model.save(tmp_path / "icons.fw")
    loaded = Classifier.load(tmp_path / "icons.fw", model=given)
    assert loaded.classes_.tolist() == model.classes_.tolist() == ["bar", "cross", "ring", "tee", "wave"]
    assert loaded.memory_.names == model.memory_.names
    for ask in ("predict", "predict_proba", "predict_known"):
        np.testing.assert_array_equal(getattr(loaded, ask)(QUERIES), getattr(model, ask)(QUERIES))
    for one in (model, loaded):
        one.add("bar", drawing("bar", 9)).forget_example(pictures["cross"][0])
    np.testing.assert_array_equal(loaded.predict_proba(QUERIES), model.predict_proba(QUERIES))
    loaded.save(tmp_path / "again.fw")
    again = Classifier.load(tmp_path / "again.fw", model=given)
    np.testing.assert_array_equal(again.predict_proba(QUERIES), model.predict_proba(QUERIES))
    fresh = clone(loaded).fit(pictures)  # prepares and is sure as the model of the file
    np.testing.assert_array_equal(fresh.predict_proba(QUERIES), clone(model).fit(pictures).predict_proba(QUERIES))


def test_embeddings_with_labels_of_numbers(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(30, 5))
    for labels in (np.arange(30) % 4, (np.arange(30) % 4) / 4, np.array(list("abc" * 10)), np.arange(30) % 2 == 0):
        if labels.dtype == float:
            model = Classifier().fit({label: X[labels == label] for label in np.unique(labels)})
        else:
            model = Classifier().fit(X, labels)
        model.save(tmp_path / "x.fw")
        loaded = Classifier.load(tmp_path / "x.fw")
        assert loaded.classes_.dtype == model.classes_.dtype
        assert loaded.predict(X).tolist() == model.predict(X).tolist()
        np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
        with pytest.raises(ValueError, match="features"):
            loaded.predict(X[:, :3])


def test_names_of_files_need_not_be_unicode(shipped: Path, pictures: Pictures, tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe \xe4.png")
    with Path(odd).open("wb") as file:
        drawing("wave").save(file, "PNG")
    model = Classifier("drawings").fit({**pictures, "wäve/\\\n": [odd]})
    model.save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    assert odd in loaded.memory_.names
    assert "wäve/\\\n" in loaded.classes_


@pytest.fixture
def saved(shipped: Path, pictures: Pictures, tmp_path: Path) -> Path:
    """A file that holds a model with its weights."""
    Classifier(write_model(tmp_path / "other.safetensors", seed=2)).fit(pictures).save(tmp_path / "icons.fw")
    return tmp_path / "icons.fw"


def refused(path: Path, says: str | None = None, **options: Any) -> str:
    with pytest.raises(InputError, match=says) as raised:
        Classifier.load(path, **options)
    message = str(raised.value)
    assert isinstance(raised.value, UserError)
    assert isinstance(raised.value, ValueError)
    assert str(path) in message
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_a_file_that_is_cut_off_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, 2000, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        refused(saved, "is cut off or no classifier")
    saved.write_bytes(data + b"more")
    refused(saved, "is cut off or no classifier")


def test_an_altered_byte_is_noticed_wherever_it_is(saved: Path) -> None:
    data = saved.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    places = [0, 3, 7, 8, *range(9, header, 97), *range(header, len(data), 1009), len(data) - 1]
    messages: list[str] = []
    for place in places:
        for bit in (1, 128):
            altered = bytearray(data)
            altered[place] ^= bit
            saved.write_bytes(bytes(altered))
            try:
                Classifier.load(saved)
            except InputError as error:
                messages.append(str(error))
            else:  # only in the white space that fills the header up
                assert bytes(data[place : place + 1]) == b" ", place
    assert all(str(saved) in message for message in messages)
    saved.write_bytes(data)
    Classifier.load(saved)


Change = Callable[[dict[str, Tensor], dict[str, Any], dict[str, str]], None]


def made_up(path: Path, change: Change) -> Path:
    """A file changed by somebody who knows how to sign it."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    header = json.loads(metadata["classifier"])
    change(tensors, header, metadata)
    if "classifier" in metadata:
        metadata["classifier"] = json.dumps(header)
    metadata["digest"] = files._digest(tensors, metadata.get("classifier", ""))
    save_file(tensors, path, metadata=metadata)
    return path


def setting(**values: Any) -> Change:
    return lambda tensors, header, _: header["model"]["learner"].update(values)


def tensor(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor], header: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def without(name: str) -> Change:
    return lambda tensors, header, _: tensors.__delitem__(name)


def said(name: str, value: Any) -> Change:
    return lambda tensors, header, _: header.__setitem__(name, value)


def of_model(name: str, value: Any) -> Change:
    return lambda tensors, header, _: header["model"].__setitem__(name, value)


def with_nan(keys: Tensor) -> Tensor:
    changed = keys.clone().float()
    changed.view(-1)[0] = torch.nan
    return changed


NONSENSE: dict[str, Change] = {
    "keys of double precision": tensor("memory.keys", lambda t: t.double()),
    "keys of half precision": tensor("memory.keys", lambda t: t.half()),
    "keys of bytes": tensor("memory.keys", lambda t: t.to(torch.uint8)),
    "keys that are a row": tensor("memory.keys", lambda t: t[0]),
    "a key missing": tensor("memory.keys", lambda t: t[1:]),
    "no keys": lambda t, h, _: t.update(
        {"memory.keys": t["memory.keys"][:0], "memory.class_of": t["memory.class_of"][:0]}
    ),
    "keys without width": tensor("memory.keys", lambda t: t[:, :0]),
    "keys of another width": tensor("memory.keys", lambda t: torch.nn.functional.normalize(t[:, :5], dim=1)),
    "nan": tensor("memory.keys", with_nan),
    "long keys": tensor("memory.keys", lambda t: 100 * t),
    "classes of int32": tensor("memory.class_of", lambda t: t.int()),
    "classes of floats": tensor("memory.class_of", lambda t: t.float()),
    "a class out of range": tensor("memory.class_of", lambda t: t + 1),
    "a negative class": tensor("memory.class_of", lambda t: t - 1),
    "a class without examples": tensor("memory.class_of", lambda t: t.clamp(max=3)),
    "classes in two dimensions": tensor("memory.class_of", lambda t: t[:, None]),
    "no classes at all": without("memory.class_of"),
    "labels missing": said("labels", ["a", "b"]),
    "too many labels": said("labels", list("abcdefgh")),
    "duplicate labels": said("labels", ["a", "a", "b", "c", "d"]),
    "labels of the same number": said("labels", [1, 1.0, 2, 3, 4]),
    "labels that are lists": said("labels", [[1], [2], [3], [4], [5]]),
    "labels that are null": said("labels", [None, "b", "c", "d", "e"]),
    "labels that are a text": said("labels", "abcde"),
    "labels that are a number": said("labels", 5),
    "labels that are nan": said("labels", [float("nan"), "b", "c", "d", "e"]),
    "names missing": said("examples", ["a"]),
    "names that are a text": said("examples", "abcdefghi"),
    "names that are numbers": said("examples", list(range(9))),
    "no model": said("model", None),
    "a model of no kind": of_model("kind", "pickled"),
    "a shipped model that is none": said("model", {"kind": "shipped", "name": "stars", "digest": "0"}),
    "a shipped model that is a path": said("model", {"kind": "shipped", "name": "/etc/passwd", "digest": "0"}),
    "a shipped model with a list for a name": said("model", {"kind": "shipped", "name": [], "digest": "0"}),
    "a shipped model of another version": said("model", {"kind": "shipped", "name": "drawings", "digest": "0"}),
    "drawings of another size": setting(item_shape=[27, 27, 1]),
    "no preparation": of_model("preparation", "soup"),
    "a preparation of lists": of_model("preparation", ["ink"]),
    "a calibration of texts": of_model("calibration", {"known": "none"}),
    "a calibration of nan": of_model("calibration", {"known": [float("nan")] * 5}),
    "a calibration out of bounds": lambda t, h, _: h["model"]["calibration"].update(log_scale=10**400),
    "a confidence refined on nothing": said("refined", {"examples": 0, "calibration": Calibration().to_json()}),
    "a confidence refined on a text": said("refined", {"examples": "9", "calibration": Calibration().to_json()}),
    "a refined confidence of nan": said("refined", {"examples": 9, "calibration": {"known": [float("nan")] * 5}}),
    "a refined confidence that is a list": said("refined", [9]),
    "no such system": setting(system="crystal ball"),
    "a system of other weights": setting(system="fast-weights"),
    "no such setting": setting(colour="red"),
    "a million filters": setting(filters=10**6),
    "filters of 10 to the 30": setting(filters=10**30),
    "a width of a billion": setting(width=10**9),
    "a billion layers": setting(layers=10**9),
    "a thousand layers": setting(layers=1000),
    "no layers": setting(layers=0),
    "filters of text": setting(filters="8"),
    "pictures of a million pixels each way": setting(item_shape=[10**6, 10**6, 3]),
    "pictures of other pixels": setting(item_shape=[10**5, 28, 1]),
    "pictures without pixels": setting(item_shape=[0, 28, 1]),
    "pictures in one dimension": setting(item_shape=[28]),
    "weights missing": without("model.hidden.weight"),
    "weights of another shape": tensor("model.hidden.weight", lambda t: t[:, :-1]),
    "weights of half precision": tensor("model.hidden.weight", lambda t: t.half()),
    "weights of nan": tensor("model.hidden.weight", lambda t: with_nan(t)),
    "an unknown format": lambda t, h, m: m.update(format="fastweights-classifier-9"),
    "no format": lambda t, h, m: m.__delitem__("format"),
    "no header": lambda t, h, m: m.__delitem__("classifier"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_what_is_made_up_is_refused_though_it_is_signed(what: str, saved: Path) -> None:
    path = made_up(saved, NONSENSE[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


@pytest.mark.parametrize("header", ["[]", "null", '"text"', "{", "[" * 5000, '{"labels": 1e999}', "\x00"])
def test_headers_that_are_none_are_refused(header: str, saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = {"format": files.FORMAT, "classifier": header, "digest": files._digest(tensors, header)}
    save_file(tensors, saved, metadata=metadata)
    refused(saved, "contradicts itself")


def test_what_made_up_files_change_is_noticed_by_the_digest_alone(saved: Path) -> None:
    """An unchanged one, signed again, is read: the refusals above are not of the signing."""
    assert Classifier.load(made_up(saved, lambda *_: None)).memory_.classes == 5


def test_other_files_are_told_apart(shipped: Path, pictures: Pictures, tmp_path: Path) -> None:
    refused(shipped / "drawings.safetensors", "is a model, not a classifier; make one with")
    refused(tmp_path, "is a folder; name a classifier")
    refused(tmp_path / "nowhere.fw", "does not exist; name a classifier")
    os.mkfifo(tmp_path / "pipe.fw")
    refused(tmp_path / "pipe.fw", "is no plain file; name a classifier")
    (tmp_path / "text.fw").write_text("hello")
    refused(tmp_path / "text.fw", "no classifier")
    save_file({"a": torch.zeros(2)}, tmp_path / "other.fw")
    refused(tmp_path / "other.fw", "of another version of fastweights")


def test_too_large_a_file_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 100)
    refused(saved, "too large for a classifier")


def test_an_older_format_is_of_another_version(saved: Path) -> None:
    path = made_up(saved, lambda t, h, m: m.update(format="fastweights-classifier-0"))
    refused(path, "is of another version of fastweights; make one with `fastweights learn`")


def test_a_learner_of_ones_own_has_to_be_given_as_it_was(shipped: Path, pictures: Pictures, tmp_path: Path) -> None:
    own, path = Own().eval(), tmp_path / "own.fw"
    Classifier(own).fit(pictures).save(path)
    refused(path, "was made with a learner of your own; give it")
    refused(path, "other weights than the learner given", model=Own().eval())
    assert Classifier.load(path, model=own).predict(pictures["bar"]).tolist() == ["bar"]


def test_a_shipped_model_that_has_changed_is_refused(
    shipped: Path, pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "icons.fw"
    Classifier("drawings").fit(pictures).save(path)
    assert path.stat().st_size < 5000  # the model is named, not stored
    other = write_model(shipped / "drawings.safetensors", seed=5)
    (shipped / "SHA256SUMS").write_text(f"{hashlib.sha256(other.read_bytes()).hexdigest()}  drawings.safetensors\n")
    refused(path, "was made with another version of the model; learn the examples again")


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"layers": 1000}, "does not hold the weights"),
        ({"layers": 10**9}, "layers must be at most 1000"),
        ({"filters": 10**6}, "does not hold the weights"),
        ({"item_shape": [10**6, 10**6, 3]}, "larger than any that a model sees"),
        ({"item_shape": [2000, 2000, 1]}, "does not hold the weights"),
    ],
)
def test_nothing_is_built_of_what_cannot_be(
    claim: dict[str, Any], says: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even without memory: a billion layers would take their time."""

    def build(settings: LearnerSettings) -> None:
        raise AssertionError("built")

    monkeypatch.setattr("fastweights.learners.saved.undrawn", build)
    refused(made_up(saved, setting(**claim)), says)


def test_a_file_names_no_other_files(saved: Path, tmp_path: Path) -> None:
    """Not even a good model, with the right digest: who sends a classifier does not choose what is opened here."""
    other = find_model(tmp_path / "other.safetensors")
    named = {"kind": "shipped", "name": other.name, "digest": other.digest}
    refused(made_up(saved, said("model", named)), "which this version of fastweights does not have")


def test_no_such_device(saved: Path) -> None:
    refused(saved, "device gpu9 is not available", device="gpu9")


# Writing


def test_nothing_half_written_is_left(saved: Path, pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    before, folder = saved.read_bytes(), saved.parent
    listed = sorted(folder.iterdir())
    model = Classifier.load(saved).forget("bar")

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(InputError, match=r"icons\.fw cannot be written .*No space left.*the former file is kept"):
        model.save(saved)
    with pytest.raises(InputError, match="cannot be written"):
        model.save(folder / "new.fw")
    assert saved.read_bytes() == before
    assert sorted(folder.iterdir()) == listed


def test_a_full_disk_is_named(saved: Path) -> None:
    """A real one: no file may be larger than a kilobyte."""
    model, before = Classifier.load(saved), saved.read_bytes()
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(InputError, match=r"icons\.fw cannot be written"):
            model.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, usual)
    assert saved.read_bytes() == before


def test_places_that_cannot_be_written_are_named(saved: Path, tmp_path: Path) -> None:
    model = Classifier.load(saved)
    (tmp_path / "file").write_text("")
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.fw", "cannot be written")):
        with pytest.raises(InputError, match=says) as raised:
            model.save(path)
        assert str(path) in str(raised.value)


def test_what_cannot_be_saved_is_refused(shipped: Path, tmp_path: Path) -> None:
    shown = [drawing("bar"), drawing("ring")]
    odd = Classifier("drawings").fit(shown, [("a", 1), "b"])
    with pytest.raises(InputError, match=r"saved by a text or a number, not by \('a', 1\)"):
        odd.save(tmp_path / "x.fw")
    empty = Classifier("drawings").fit(shown, ["a", "b"]).forget("a").forget("b")
    with pytest.raises(InputError, match="nothing to save yet"):
        empty.save(tmp_path / "x.fw")
    assert not (tmp_path / "x.fw").exists()


def test_a_file_of_fast_weights_keeps_its_learner(pictures: Pictures, tmp_path: Path) -> None:
    learner = build_learner(LearnerSettings(filters=8, width=10))
    model = Classifier(learner).fit(pictures)
    model.save(tmp_path / "x.fw")
    np.testing.assert_array_equal(
        Classifier.load(tmp_path / "x.fw").predict_proba(QUERIES), model.predict_proba(QUERIES)
    )
