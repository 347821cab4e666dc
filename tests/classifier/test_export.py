"""A classifier as an ONNX graph answers as it does itself."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastweights import Classifier
from fastweights.classifier import export as exporting
from fastweights.classifier.errors import InputError
from fastweights.learners.registry import LearnerSettings, build_learner

from .drawn import SHAPES, TINY, drawing

NEEDED = ("onnx", "onnxscript", "onnxruntime")
has_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs fastweights[onnx]"
)
QUERIES = [drawing(name, 2) for name in sorted(SHAPES)] + [drawing("bar", 9)]
EXAMPLES = {name: [drawing(name, 4 * number) for number in range(1 + place % 3)] for place, name in enumerate(SHAPES)}


def fitted(settings: LearnerSettings = TINY) -> Classifier:
    torch.manual_seed(0)
    return Classifier(build_learner(settings).eval()).fit(EXAMPLES)


def opened(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@has_onnx
@pytest.mark.filterwarnings("default")  # of the exporter's own imports
def test_the_graph_answers_as_the_classifier(tmp_path: Path) -> None:
    model = fitted()
    exporting.export(model, tmp_path / "icons.onnx")
    session, pixels = opened(tmp_path / "icons.onnx"), exporting.pixels_of(model, QUERIES)
    chances, known = session.run(["probabilities", "known"], {"pixels": pixels})
    expected = model.predict_all(QUERIES)
    np.testing.assert_allclose(chances, expected[0], atol=1e-4)
    np.testing.assert_allclose(known, expected[1], atol=1e-4)
    alone = session.run(None, {"pixels": pixels[:1]})[0]
    np.testing.assert_allclose(alone, expected[0][:1], atol=1e-4)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == model.classes_.tolist()
    assert facts["preparation"] == "picture"


@has_onnx
@pytest.mark.filterwarnings("default")
def test_keys_alone_and_a_memory_in_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the docs: write, read, forget."""
    model = fitted()
    exporting.export(model, tmp_path / "keys.onnx", memory=False)
    session, pixels = opened(tmp_path / "keys.onnx"), exporting.pixels_of(model, QUERIES)
    keys = session.run(["keys"], {"pixels": pixels})[0]
    np.testing.assert_allclose(keys, model._keys(QUERIES)[0], atol=1e-4)

    page = (Path(__file__).parents[2] / "docs/encoders.md").read_text(encoding="utf-8")
    lines = next(block for block in page.split("```python\n") if "onnxruntime" in block).split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(lines, names)
    for place, name in enumerate(sorted(SHAPES)):
        names["write"](name, pixels[[place]])
    assert names["read"](pixels[: len(SHAPES)]) == sorted(SHAPES)
    names["forget"]("bar")
    assert "bar" not in names["read"](pixels)


def test_without_the_packages_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "PACKAGES", ("onnx_that_is_not_there",))
    with pytest.raises(InputError, match=r"pip install 'fastweights\[onnx\]'"):
        exporting.export(fitted(), tmp_path / "x.onnx")


def test_what_is_no_graph_of_ours_is_refused(tmp_path: Path) -> None:
    for model in (
        Classifier().fit(np.eye(3), list("abc")),
        Classifier("texts").fit({"a": ["one word"], "b": ["other"]}),
    ):
        with pytest.raises(InputError, match="only classifiers of pictures"):
            exporting.export(model, tmp_path / "x.onnx")
        with pytest.raises(InputError, match="take pixels"):
            exporting.pixels_of(model, QUERIES)
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize("classes", [1, 2, 6])
def test_the_graph_in_torch(classes: int) -> None:
    """The arithmetic of the graph, without exporting it."""
    model = fitted()
    for label in list(model.classes_)[classes:]:
        model.forget(label)
    memory = model.memory_
    units = memory.sums / np.linalg.norm(memory.sums, axis=1, keepdims=True)
    assert model._model is not None
    graph = exporting.Answers(model._model, units, memory.shots, model._refined.of(memory)).eval()
    with torch.inference_mode():
        chances, known = graph(torch.from_numpy(exporting.pixels_of(model, QUERIES)))
    expected = model.predict_all(QUERIES)
    np.testing.assert_allclose(chances.numpy(), expected[0], atol=1e-5)
    np.testing.assert_allclose(known.numpy(), expected[1], atol=1e-5)
