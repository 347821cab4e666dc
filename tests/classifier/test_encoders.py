"""Any encoder: functions, modules, files of one's own; what they may answer, what is kept, and adapters above them."""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from PIL import Image
from sklearn.base import clone
from torch import nn

from fastweights import Classifier
from fastweights.classifier import adapter as adapters
from fastweights.classifier import encoders
from fastweights.classifier.encoders import BATCH, UNASKED, encoder_of
from fastweights.classifier.errors import InputError
from fastweights.classifier.key_cache import FILE

ROOT = Path(__file__).parents[2]
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (20, 30, 210)}


def picture(colour: str, shift: int = 0, side: int = 8) -> Image.Image:
    return Image.new("RGB", (side, side), tuple(channel + shift for channel in COLOURS[colour]))


def mean_colour(pictures: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(one, float).mean((0, 1)) for one in pictures])


def letters(texts: list[str]) -> list[list[float]]:
    return [[float(text.count(letter)) for letter in "abc"] for text in texts]


class Asked:
    """Counts what it is asked; not in an attribute, which would count as a setting."""

    def __init__(self, answer: Callable[[list[Any]], Any] = letters) -> None:
        self.answer, self.note = answer, list[Any]().append

    def __call__(self, items: list[Any]) -> Any:
        self.note(list(items))
        return self.answer(items)

    @property
    def batches(self) -> list[Any]:
        return self.note.__self__  # type: ignore[attr-defined]


class Tiny(nn.Module):
    """A network as timm makes them: pictures (n, 3, height, width) in, vectors (n, features) out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 1)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).mean((2, 3))


def test_a_function_of_pictures() -> None:
    model = Classifier(encoder=mean_colour).fit({name: [picture(name), picture(name, 20)] for name in COLOURS})
    assert model.predict([picture("green", 10), picture("red", 5)]).tolist() == ["green", "red"]
    assert model.predict(picture("blue", 9)).tolist() == ["blue"]
    assert model.predict_proba([picture("red", 3)]).argmax() == model.classes_.tolist().index("red")
    assert model.memory_.width == 3
    model.add("white", [Image.new("RGB", (4, 4), "white")])
    assert model.predict([Image.new("RGB", (9, 9), (250, 250, 250))]).tolist() == ["white"]
    assert model.explain([picture("red")])[0].label == "red"


def test_files_reach_an_encoder_as_pictures(tmp_path: Path) -> None:
    for name in COLOURS:
        picture(name).convert("RGBA").save(tmp_path / f"{name}.png")
    encoder = Asked(mean_colour)
    model = Classifier(encoder=encoder).fit({name: [tmp_path / f"{name}.png"] for name in COLOURS})
    assert all(one.mode == "RGB" for batch in encoder.batches for one in batch)
    assert model.predict((tmp_path / "red.png").read_bytes()).tolist() == ["red"]
    assert str(tmp_path / "red.png") in model.memory_.names


def test_texts_and_anything_else() -> None:
    model = Classifier(encoder=letters).fit(["aab", "bbc", "cca"], ["x", "y", "z"])
    assert model.predict("aaab").tolist() == ["x"]
    assert model.memory_.names == ["aab", "bbc", "cca"]
    of_dicts = Classifier(encoder=lambda items: [[one["a"], one["b"]] for one in items])
    of_dicts.fit([{"a": 1, "b": 0}, {"a": 0, "b": 1}], [0, 1])
    assert of_dicts.predict({"a": 3, "b": 1}).tolist() == [0]
    rows = np.eye(3)
    of_rows = Classifier(encoder=lambda items: np.stack(items)).fit(rows, list("abc"))
    assert of_rows.predict(rows + 0.1).tolist() == ["a", "b", "c"]


def test_a_module_is_given_tensors_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    module = Tiny().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = Classifier(encoder=module).fit({name: [picture(name)] for name in COLOURS})
    assert model.predict([picture(name, 2) for name in COLOURS]).tolist() == list(COLOURS)
    assert module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(InputError, match=r"\(3, 4, 4\) and \(3, 8, 8\) make no batch; give prepare=") as raised:
        encoder_of(module).ask([picture("red"), picture("red", side=4)])
    assert isinstance(raised.value, ValueError)
    prepared = Classifier(
        encoder=module, prepare=lambda one: torch.from_numpy(np.array(one.resize((4, 4)))).permute(2, 0, 1) / 255
    )
    prepared.fit({"red": [picture("red"), picture("red", 5, side=11)], "blue": [picture("blue")]})
    assert prepared.predict([picture("blue", 5, side=3)]).tolist() == ["blue"]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)


def test_lines_of_the_docs_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timm` gives a module and a transform; `sentence_transformers` a module whose `encode` takes a list of texts."""

    class SentenceTransformer(nn.Sequential):
        def __init__(self, name: str) -> None:
            super().__init__(nn.Linear(2, 2))

        def encode(self, sentences: list[str], show_progress_bar: bool = False) -> np.ndarray:
            return np.array([[float(s.count(c)) for c in "abcdefghij"] for s in sentences], np.float32)

    def create_model(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
        torch.manual_seed(0)
        return Tiny()

    def create_transform(input_size: tuple[int, int, int]) -> Callable[[Image.Image], torch.Tensor]:
        return lambda image: torch.from_numpy(np.array(image.resize(input_size[1:]))).permute(2, 0, 1) / 255

    data = SimpleNamespace(
        create_transform=create_transform, resolve_model_data_config=lambda network: {"input_size": (3, 6, 6)}
    )
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model, data=data))
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=SentenceTransformer))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    picture("red").save("cat.jpg")
    picture("blue").save("dog.jpg")
    _, timm_lines, sentence_lines, *_ = blocks("encoders.md")
    names: dict[str, Any] = {"Classifier": Classifier, "Path": Path}
    exec(timm_lines, names)
    assert names["clf"].predict([picture("red", 3, side=20), Path("dog.jpg")]).tolist() == ["cat", "dog"]
    assert (tmp_path / ".cache/dinov2" / FILE).exists()
    exec(sentence_lines, names)
    assert names["clf"].predict(["The striker scored twice."]).tolist() == ["sport"]


@pytest.mark.filterwarnings("ignore:.*left out")
def test_it_is_asked_in_batches_and_never_twice_for_what_it_knows(tmp_path: Path) -> None:
    texts = [f"a{'b' * (number % 40)}{'c' * (number // 40)}" for number in range(BATCH + 30)]
    encoder = Asked()
    model = Classifier(encoder=encoder, cache=tmp_path).fit(
        [*texts, texts[3]], [number % 2 for number in range(len(texts))] + [1]
    )
    assert [len(batch) for batch in encoder.batches] == [BATCH, 30]
    expected = Classifier(encoder=letters).fit([*texts, texts[3]], [number % 2 for number in range(len(texts))] + [1])
    np.testing.assert_array_equal(model.memory_.keys, expected.memory_.keys)
    again = Classifier(encoder=encoder, cache=tmp_path).fit(texts, [number % 2 for number in range(len(texts))])
    again.predict(texts)
    assert len(encoder.batches) == 2
    again.predict(["aaaa", texts[0], "aaaa"])
    assert encoder.batches[2:] == [["aaaa"]]
    other = Asked(lambda texts: np.array(letters(texts)) + 1)

    def another(texts: list[str]) -> Any:
        return other(texts)

    Classifier(encoder=another, cache=tmp_path).fit(texts, [number % 2 for number in range(len(texts))])
    assert len(other.batches) == 2  # the vectors of one are none of another


def test_pictures_are_known_by_their_content(tmp_path: Path) -> None:
    for name in COLOURS:
        picture(name).save(tmp_path / f"{name}.png")
    encoder = Asked(mean_colour)
    model = Classifier(encoder=encoder, cache=tmp_path / "kept")
    model.fit({name: [tmp_path / f"{name}.png"] for name in COLOURS})
    (tmp_path / "red.png").rename(tmp_path / "other.png")
    model.predict([tmp_path / "other.png", (tmp_path / "blue.png").read_bytes()])
    assert len(encoder.batches) == 1
    module, folder = Tiny(), tmp_path / "module"
    Classifier(encoder=module, cache=folder).fit({name: [picture(name)] for name in COLOURS})
    before = (folder / FILE).read_bytes()
    nn.init.normal_(module.layer.weight)
    Classifier(encoder=module, cache=folder).fit({name: [picture(name)] for name in COLOURS})
    assert (folder / FILE).read_bytes() != before  # other weights, other vectors


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match=r"the cache .* cannot be used .*; delete it"):
        Classifier(encoder=letters, cache=tmp_path).fit(["a", "b"], [0, 1])
    with pytest.raises(InputError, match="cannot be used"):
        Classifier(encoder=letters, cache=tmp_path / FILE / "below").fit(["a", "b"], [0, 1])


def failing(texts: list[str]) -> Any:
    if any("bad" in text for text in texts):
        raise RuntimeError("cannot\nread this")
    return letters(texts)


def nan(texts: list[str]) -> Any:
    vectors = np.array(letters(texts))
    vectors[[place for place, text in enumerate(texts) if "bad" in text]] = np.nan
    return vectors


WRONG: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "a failure": (failing, "the encoder failing fails on abad \\(RuntimeError: cannot read this\\)"),
    "nan": (nan, "the vector of abad by the encoder nan holds numbers that are not finite"),
    "zeros": (lambda texts: [[0, 0] if "bad" in t else [1, 2] for t in texts], "vector of abad .* is all zeros"),
    "one vector": (lambda texts: np.ones(3), r"returns the shape \(3,\) for 1 item; have it return \(1, features\)"),
    "maps": (lambda texts: np.ones((len(texts), 3, 2, 2)), r"returns the shape \(1, 3, 2, 2\) for 1 item"),
    "too few": (lambda texts: np.ones((0, 3)), r"returns the shape \(0, 3\) for 1 item"),
    "no numbers": (lambda texts: {"last_hidden_state": 1}, "returns dict, not an array"),
    "nothing": (lambda texts: None, r"returns the shape \(\) for|returns NoneType"),
    "complex": (lambda texts: np.array(letters(texts)) * 1j, "returns complex128 where numbers belong"),
    "words": (lambda texts: [[text, "b"] for text in texts], "returns <U. where numbers belong"),
    "holes": (lambda texts: [[1.0, None, 2.0] for _ in texts], "returns object where numbers belong"),
    "turned": (lambda texts: np.array(letters(texts)).T, r"returns the shape \(3, 1\) for 1 item"),
    "ragged": (lambda texts: [[1.0] * (1 + len(t)) for t in texts], "different|gives a vector of width|shape"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_answers_are_named_and_nothing_is_lost(what: str) -> None:
    encoder, says = WRONG[what]
    model = Classifier(encoder=letters).fit(["aab", "bbc"], ["x", "y"])
    before = model.predict_proba(["ab"])
    model.encoder = encoder  # as if it had turned bad; a refused fit leaves all as it was
    with pytest.raises(InputError, match=says) as raised:
        model.fit(["aab", "bbc", "abad"], ["x", "y", "x"])
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")
    np.testing.assert_array_equal(model.predict_proba(["ab"]), before)
    assert model.classes_.tolist() == ["x", "y"]


def item_by_item(texts: list[str]) -> Any:
    for text in texts:
        yield torch.tensor(letters([text])[0])


ANSWERS: dict[str, Callable[[list[str]], Any]] = {
    "float64": lambda texts: np.array(letters(texts)),
    "half": lambda texts: np.array(letters(texts), np.float16),
    "bfloat16": lambda texts: torch.tensor(letters(texts)).bfloat16(),
    "whole numbers": lambda texts: np.array(letters(texts), np.uint8),
    "gradients": lambda texts: torch.tensor(letters(texts), requires_grad=True),
    "a list of gradients": lambda texts: [torch.tensor(one, requires_grad=True) for one in letters(texts)],
    "a generator": item_by_item,
    "sparse": lambda texts: scipy.sparse.csr_matrix(letters(texts)),
    "sparse rows": lambda texts: [torch.tensor(one).to_sparse() for one in letters(texts)],
    "enormous": lambda texts: np.array(letters(texts)) * 2.0**1000,
    "minute": lambda texts: torch.tensor(letters(texts), dtype=torch.float64) * 2.0**-1000,
}


@pytest.mark.parametrize("what", ANSWERS)
def test_vectors_come_in_many_forms(what: str) -> None:
    texts, labels = ["aab", "bbc", "ac"], ["x", "y", "x"]
    model = Classifier(encoder=ANSWERS[what]).fit(texts, labels)
    expected = Classifier(encoder=letters).fit(texts, labels)
    np.testing.assert_array_equal(model.memory_.keys, expected.memory_.keys)
    np.testing.assert_array_equal(model.predict_proba(["ab", "c"]), expected.predict_proba(["ab", "c"]))


def test_embeddings_of_any_size_have_a_direction() -> None:
    X = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    expected = Classifier().fit(X, [0, 1])
    for scale in (2.0**-1000, 2.0**1000):
        model = Classifier().fit(scale * X, [0, 1])
        np.testing.assert_array_equal(model.memory_.keys, expected.memory_.keys)
        np.testing.assert_array_equal(model.predict_proba(scale * X), expected.predict_proba(X))


def test_items_may_come_from_generators() -> None:
    model = Classifier(encoder=letters).fit((text for text in ["aab", "bbc"]), (label for label in "xy"))
    assert model.add("z", (text for text in ["ccc"])).predict(text for text in ["a", "cc"]).tolist() == ["x", "z"]
    assert Classifier(encoder=letters).fit({"x": iter(["aab"]), "y": iter(["bcc"])}).classes_.tolist() == ["x", "y"]
    for nothing in (
        lambda: model.predict(iter([])),
        lambda: model.add("w", iter([])),
        lambda: model.partial_fit([], []),
    ):
        with pytest.raises(InputError, match="give at least one"):
            nothing()
    assert model.classes_.tolist() == ["x", "y", "z"]


def test_an_encoder_that_changes_its_answers_is_warned_of() -> None:
    dropout, times = nn.Dropout(0.5), 0
    torch.manual_seed(0)

    def left_on(texts: list[str]) -> torch.Tensor:
        return dropout(torch.tensor(letters(texts)).repeat(1, 20) + 1)

    def widening(texts: list[str]) -> np.ndarray:
        nonlocal times
        times += 1
        return np.pad(np.array(letters(texts)), ((0, 0), (0, times)), constant_values=1.0)

    with pytest.warns(
        UserWarning, match=r"the encoder left_on, asked again for aab alone, gives another vector, whose"
    ):
        Classifier(encoder=left_on).fit(["aab", "bbc"], ["x", "y"])
    with pytest.warns(UserWarning, match="gives another vector, of width 5: its answers will vary; switch off"):
        model = Classifier(encoder=widening).fit(["aab", "bbc"], ["x", "y"])
    with pytest.raises(InputError, match="gives vectors of width 6, but the memory holds keys of 4"):
        model.predict(["a"])
    steady = Asked()
    Classifier(encoder=steady).fit(["aab", "bbc"], ["x", "y"]).add("x", ["ab"]).predict(["ac"])
    assert steady.batches == [["aab", "bbc"], ["aab"], ["ab"], ["ac"]]  # asked again once, when it begins


@pytest.mark.parametrize("encoder", [failing, nan])
def test_what_fails_is_skipped_if_asked(encoder: Callable[[list[str]], Any]) -> None:
    model = Classifier(encoder=encoder, errors="skip")
    with pytest.warns(UserWarning, match="abad was skipped: the "):
        model.fit(["aab", "abad", "bbc"], ["x", "x", "y"])
    assert model.memory_.names == ["aab", "bbc"]
    with pytest.warns(UserWarning, match="cbad was skipped"):
        assert model.predict(["cbad", "bc"]).tolist() == [None, "y"]
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(
            InputError, match=r"none of the examples of 'z' can be read \(the .*(fails on|not finite).*\); give others"
        ),
    ):
        model.add("z", ["bad"])


def test_files_that_are_no_pictures_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("nothing")
    model = Classifier(encoder=mean_colour).fit({name: [picture(name)] for name in COLOURS})
    for wrong in (tmp_path / "a.png", tmp_path / "gone.png"):
        with pytest.raises(InputError, match=wrong.name):
            model.predict([picture("red"), wrong])
    with pytest.raises(InputError, match=r"the preparation fails on 1 \(ZeroDivisionError"):
        Classifier(encoder=letters, prepare=lambda one: one if one == "a" else 1 / 0).fit(["a", 5], [0, 1])


def test_another_width_than_the_memorys_is_refused() -> None:
    width = 3

    def changing(texts: list[str]) -> np.ndarray:
        return np.ones((len(texts), width)) + np.arange(width)

    model = Classifier(encoder=letters).fit(["aab", "bbc"], ["x", "y"])
    model._sight = type(model._sight)(encoder=encoder_of(changing))
    width = 4
    for ask in (lambda: model.predict(["a"]), lambda: model.add("z", ["a"]), lambda: model.partial_fit(["a"], ["x"])):
        with pytest.raises(InputError, match="gives vectors of width 4, but the memory holds keys of 3"):
            ask()
    assert model.classes_.tolist() == ["x", "y"]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: Classifier(encoder=Tiny).fit(["a", "b"], [0, 1]), "or a module, not the class Tiny; make one"),
    "a number": (lambda: Classifier(encoder=5).fit(["a", "b"], [0, 1]), "or a module, not int"),
    "a word": (lambda: Classifier(encoder="dino").fit(["a", "b"], [0, 1]), "'dino' is no encoder"),
    "no file": (
        lambda: Classifier(encoder="gone.py:f").fit(["a", "b"], [0, 1]),
        "'gone.py:f' is no encoder in a file; write my_file.py:function, with a file that exists",
    ),
    "two models": (lambda: Classifier("drawings", encoder=letters).fit(["a", "b"], [0, 1]), "a model or an encoder"),
    "prepare alone": (lambda: Classifier(prepare=letters).fit([[1.0], [2.0]], [0, 1]), "give encoder=, too"),
    "prepare of a number": (lambda: Classifier(encoder=letters, prepare=5).fit(["a", "b"], [0, 1]), "of one item"),
    "texts for a module": (
        lambda: Classifier(encoder=Tiny()).fit(["a", "b"], [0, 1]),
        "a module takes tensors, not str",
    ),
    "a number of items": (lambda: Classifier(encoder=letters).fit(["a", "b"], [0, 1]).predict(5), "not int"),
    "no items": (lambda: Classifier(encoder=letters).fit(["a", "b"], [0, 1]).predict([]), "at least one item"),
    "one text, two names": (lambda: Classifier(encoder=letters).fit(["ab", "ba"], [0, 1]), "are the same item, under"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_encoder_is_refused_in_one_sentence(what: str) -> None:
    wrong, says = REFUSED[what]
    with pytest.raises(InputError, match=says) as raised:
        wrong()
    assert str(raised.value).endswith(".")


# On disk


def test_an_encoder_is_named_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.fw"
    model = Classifier(encoder=letters).fit(["aab", "bbc"], ["x", "y"])
    model.save(path)
    with pytest.raises(InputError, match=r"made with the encoder letters, which is not stored along; give it: Classif"):
        Classifier.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = Classifier.load(path, encoder=letters)
    np.testing.assert_array_equal(loaded.predict_proba(["abc", "cb"]), model.predict_proba(["abc", "cb"]))
    assert clone(loaded).fit(["aab", "bbc"], ["x", "y"]).predict(["aa"]).tolist() == ["x"]
    loaded.add("z", ["ccc"]).save(path)
    assert Classifier.load(path, encoder=letters).classes_.tolist() == ["x", "y", "z"]
    with pytest.warns(UserWarning, match="the code or the settings of the encoder nan are not what"):
        Classifier.load(path, encoder=nan)
    shrunk = Classifier.load(path, encoder=UNASKED).forget("x")
    with pytest.raises(InputError, match="the encoder was not given"):
        shrunk.predict(["a"])
    shrunk.save(path)
    assert Classifier.load(path, encoder=letters).classes_.tolist() == ["y", "z"]


def test_large_pictures_are_not_all_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "TOGETHER", 16 * 16 * 10)
    pictures = [Image.new("RGB", (16, 16), (number, 0, 255 - number)) for number in range(60)]
    for number, one in enumerate(pictures):
        one.save(tmp_path / f"{number}.png")
    paths = [tmp_path / f"{number}.png" for number in range(60)]
    large, small = Asked(mean_colours), Asked(mean_colours)
    found = [np.concatenate([v for v, _ in encoder_of(large).encode(paths)])]
    assert [len(batch) for batch in large.batches] == [16, 16, 16, 12]
    found.append(np.concatenate([v for v, _ in encoder_of(small, prepare=np.asarray).encode(paths)]))
    assert [len(batch) for batch in small.batches] == [60]
    np.testing.assert_array_equal(*found)


def mean_colours(pictures: list[Any]) -> np.ndarray:
    return np.stack([np.asarray(one, np.float64).mean((0, 1)) + 1 for one in pictures])


def test_weights_of_networks_are_recognised(tmp_path: Path) -> None:
    path, module = tmp_path / "x.fw", Tiny()

    def through(pictures: list[Image.Image]) -> torch.Tensor:
        return encoder_of(module).ask(pictures)

    for encoder in (module, through):
        Classifier(encoder=encoder).fit({name: [picture(name)] for name in COLOURS}).save(path)
        Classifier.load(path, encoder=encoder)
        saved = module.layer.weight.detach().clone()
        nn.init.normal_(module.layer.weight)
        with pytest.raises(InputError, match="other weights than those of the encoder given"):
            Classifier.load(path, encoder=encoder)
        with torch.no_grad():
            module.layer.weight.copy_(saved)
    Classifier().fit(np.eye(3), list("abc")).save(path)
    with pytest.raises(InputError, match="without an encoder of your own"):
        Classifier.load(path, encoder=module)


def test_an_encoder_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def encode(texts):\n    return [[float(text.count(letter)) for letter in 'abc'] for text in texts]\n"
    )
    name = f"{tmp_path}/mine.py:encode"
    model = Classifier(encoder=name).fit(["aab", "bbc"], ["x", "y"])
    model.save(tmp_path / "x.fw")
    with pytest.raises(InputError, match=r"give it: --encoder .*mine.py:encode"):
        Classifier.load(tmp_path / "x.fw")
    assert Classifier.load(tmp_path / "x.fw", encoder=name).predict("aaa").tolist() == ["x"]


# Adapters


def embeddings(classes: int = 30, each: int = 10, width: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Classes that differ in a few directions, among others that mean nothing and are louder."""
    rng = np.random.default_rng(seed)
    means = np.zeros((classes, width))
    means[:, :6] = rng.normal(size=(classes, 6))
    noise = rng.normal(size=(classes * each, width)) * np.r_[np.full(6, 0.2), np.full(width - 6, 1.0)]
    return np.repeat(means, each, 0) + noise + 1.0, np.repeat([f"class {c:02}" for c in range(classes)], each)


def test_an_adapter_learns_which_directions_matter(tmp_path: Path) -> None:
    X, y = embeddings(40, 12)
    adapter, measured = adapters.train(X, y)
    before, after = measured["without"]["5way_1shot"], measured["with"]["5way_1shot"]
    assert after > before + 10
    assert measured["classes"] == {"val": 10, "test": 10, "train": 20}
    adapter.save(tmp_path / "a.safetensors")
    other, labels = embeddings(8, 10, seed=5)
    some = np.arange(80) % 10 == 0
    with_it = Classifier(tmp_path / "a.safetensors").fit(other[some], labels[some])
    without = Classifier().fit(other[some], labels[some])
    assert with_it.score(other[~some], labels[~some]) > without.score(other[~some], labels[~some]) + 0.1
    with_it.save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    np.testing.assert_array_equal(loaded.predict_proba(other), with_it.predict_proba(other))
    assert (
        clone(loaded).fit(other[some], labels[some]).predict(other[:3]).tolist() == with_it.predict(other[:3]).tolist()
    )
    rows = {f"row {place}": row for place, row in enumerate(other)}
    above = Classifier(tmp_path / "a.safetensors", encoder=lambda names: np.stack([rows[name] for name in names]))
    above.fit([f"row {place}" for place in np.flatnonzero(some)], labels[some])
    np.testing.assert_array_equal(above.predict(list(rows)), with_it.predict(other))
    with pytest.raises(ValueError, match="features"):
        with_it.predict(other[:, :5])
    with pytest.raises(InputError, match="24"):
        Classifier(tmp_path / "a.safetensors").fit(other[:, :5], labels)


def test_where_an_adapter_does_not_help_none_is_chosen(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(300, 8)), np.repeat(np.arange(30), 10)
    adapter, measured = adapters.train(X, y)
    assert measured["chosen"] is None
    assert measured["with"] == measured["without"]
    adapter.save(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size < 1000  # no matrix of ones
    loaded = Classifier(tmp_path / "a.safetensors").fit(X, y)
    np.testing.assert_array_equal(loaded.predict(X), Classifier().fit(X, y).predict(X))
    with pytest.raises(InputError, match="take fewer shots"):
        adapters.train(X, y, shot=6)


def test_covariances_by_hand() -> None:
    rng = np.random.default_rng(2)
    sizes = np.array([3, 5, 4])
    items = rng.normal(size=(12, 2))
    groups = np.split(items, np.cumsum(sizes)[:-1])
    within = sum((group - group.mean(0)).T @ (group - group.mean(0)) for group in groups) / (12 - 3)
    between = np.cov(np.stack([group.mean(0) for group in groups]).T) - within * np.mean([1 / 3, 1 / 5, 1 / 4])
    found = adapters.covariances(items, sizes)
    np.testing.assert_allclose(found[0], within)
    np.testing.assert_allclose(found[1], between)


def test_keys_of_an_adapter_are_alike_as_items_are_likely_of_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two items are of one class or not: the part of the log-likelihood ratio of normal laws that needs both."""
    monkeypatch.setattr(adapters, "WITHIN", (0.0,))
    monkeypatch.setattr(adapters, "BETWEEN", (0.0,))
    X, _ = embeddings(60, 10, 6)
    keys = adapters.unit(X)
    items = adapters._items(keys, np.repeat(np.arange(60), 10), np.arange(60), np.arange(60))
    (_, centred), (_, adapter) = adapters.candidates(items)
    np.testing.assert_allclose(centred.keys(X), adapters.unit(keys - keys.mean(0)), atol=1e-6)
    assert adapter.weight is not None
    within, between = adapters.covariances(keys - keys.mean(0), np.full(60, 10))
    total = within + between
    expected = np.linalg.inv(total) @ between @ np.linalg.inv(total - between @ np.linalg.inv(total) @ between)
    np.testing.assert_allclose(
        adapter.weight.T @ adapter.weight, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.parametrize(("items", "features"), [(30, 200), (200, 30), (90, 80)])
def test_directions_are_those_of_the_largest_variance(
    items: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "LOOKED_AT", 70)
    monkeypatch.setattr(adapters, "DIRECTIONS", 4)
    rng = np.random.default_rng(0)
    true = np.linalg.qr(rng.normal(size=(features, 4)))[0]
    X = rng.normal(size=(items, 4)) @ (true * 10).T + 0.01 * rng.normal(size=(items, features))
    found = adapters._principal(X)
    np.testing.assert_allclose(found.T @ found, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(np.linalg.svd(found.T @ true)[1], 1, atol=1e-3)


def test_embeddings_that_are_all_alike_are_no_reason_to_fail() -> None:
    items = adapters._items(np.ones((30, 4), np.float32) / 2, np.repeat(np.arange(3), 10), np.arange(3), np.arange(3))
    [(_, centred)] = adapters.candidates(items)
    assert np.isfinite(centred.keys(np.ones((2, 4)))).all()


def test_bad_embeddings_are_refused(tmp_path: Path) -> None:
    X, y = embeddings()
    path = tmp_path / "e.npz"
    bad: dict[str, Callable[[], Any]] = {
        "cannot be read": lambda: path.write_bytes(b"nothing"),
        "holds keys; save X": lambda: np.savez(path, keys=X),
        "X is": lambda: np.savez(path, X=X[0], y=y),
        "a label each": lambda: np.savez(path, X=X, y=y[1:]),
        "not finite, first in row 3": lambda: np.savez(path, X=np.where(np.arange(300)[:, None] == 3, np.nan, X), y=y),
    }
    for says, write in bad.items():
        path.unlink(missing_ok=True)
        write()
        with pytest.raises(InputError, match=says):
            adapters.read_embeddings(path)
    with pytest.raises(InputError, match="an adapter needs 25 such classes"):
        adapters.train(X[:100], y[:100])
    adapters.Adapter(np.eye(3, dtype=np.float32), np.full(3, np.nan, np.float32)).save(tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"is damaged|contradicts itself"):
        Classifier(tmp_path / "a.safetensors").fit(np.eye(3), list("abc"))


# The same again


def test_the_same_again_says_nothing_new() -> None:
    with pytest.warns(UserWarning, match="aab: left out, the same as another of its class, 1 of 3 items"):
        model = Classifier(encoder=letters).fit({"x": ["aab", "aab"], "y": ["bcc"]})
    assert model.memory_.counts.tolist() == [1, 1]
    with pytest.warns(UserWarning, match="aba: left out"):  # the same for the encoder
        model.add("x", ["aba", "aac"])
    assert model.memory_.names == ["aab", "bcc", "aac"]
    plain = Classifier(encoder=letters).fit({"x": ["aab"], "y": ["bcc"]}).add("x", ["aac"])
    np.testing.assert_array_equal(model.predict_proba(["abc"]), plain.predict_proba(["abc"]))
    with pytest.warns(UserWarning, match="aab, bcc, aac: left out, .* 3 of 3 items"):
        model.merge(plain)
    assert len(model.memory_) == 3
    with pytest.raises(InputError, match="under the names"):
        model.add("y", ["aab"])


def test_the_same_key_again_says_nothing_new() -> None:
    model = Classifier(encoder=letters).fit({"x": ["aab"], "y": ["bcc"]})
    keys = model.encode(["aab", "abb", "abb"])
    assert model.check_keys(keys, list("xxx"), list("abc")) == {0: "aab", 2: "b"}
    with pytest.warns(UserWarning, match="a, c: left out, the same as another of its class, 2 of 3 items"):
        model.add_keys(keys, list("xxx"), list("abc"))
    assert model.memory_.names == ["aab", "bcc", "b"]
    with pytest.raises(InputError, match="under the names"):
        model.check_keys(keys, list("yyy"), list("abc"))
    fading = Classifier(encoder=letters, half_life=30).fit({"x": ["aab"], "y": ["bcc"]})
    assert fading.check_keys(keys, list("xxx"), list("abc")) == {}


def test_embeddings_may_be_alike_and_fading_examples_may_come_again() -> None:
    assert len(Classifier().fit(np.eye(2)[[0, 0, 1]], list("aab")).memory_) == 3
    model = Classifier(encoder=letters, half_life=30).fit({"x": ["aab"], "y": ["bcc"]})
    assert model.add("x", ["aab"], when="2030-01-01").memory_.counts.tolist() == [2, 1]
