"""What makes an encoder another one: weights, settings and code, wherever it keeps them."""

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastweights import Classifier
from fastweights.classifier import encoder_digests
from fastweights.classifier.encoder_digests import digests_of
from fastweights.classifier.encoders import encoder_of
from fastweights.classifier.errors import InputError

NET = nn.Linear(2, 3)


def through(items: list[Any], network: nn.Module = NET) -> torch.Tensor:
    with torch.no_grad():
        return network(torch.tensor([[len(one), one.count("a")] for one in items], dtype=torch.float32))


@torch.no_grad()
def decorated(items: list[Any]) -> torch.Tensor:
    return through(items, NET)


def by_a_helper(items: list[Any]) -> torch.Tensor:
    return decorated(items)


class Holder:
    def __init__(self) -> None:
        self.parts = {"network": [NET]}

    def __call__(self, items: list[Any]) -> torch.Tensor:
        return through(items, self.parts["network"][0])

    def ask(self, items: list[Any]) -> torch.Tensor:
        return self(items)


class Method:
    """Has nothing of its own, but a method that uses something."""

    def __call__(self, items: list[Any]) -> torch.Tensor:
        return decorated(items)


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, one: str) -> str:
        return one * int(self.factor)


ENCODERS: dict[str, Callable[[list[Any]], Any]] = {
    "decorated": decorated,
    "by a helper": by_a_helper,
    "partial": functools.partial(through, network=NET),
    "partial of a partial": functools.partial(functools.partial(through), network=NET),
    "object": Holder(),
    "bound method": Holder().ask,
    "method": Method(),
    "default": through,
    "lambda": lambda items: by_a_helper(items),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_other_weights_are_noticed_wherever_the_network_is(name: str, tmp_path: Path) -> None:
    encoder = ENCODERS[name]
    model = Classifier(encoder=encoder, cache=tmp_path / "vectors").fit(["aab", "b"], ["x", "y"])
    model.save(tmp_path / "x.fw")
    Classifier.load(tmp_path / "x.fw", encoder=encoder)
    nn.init.normal_(NET.weight)
    fresh = Classifier(encoder=encoder, cache=tmp_path / "vectors").fit(["aab", "b"], ["x", "y"])
    assert not np.allclose(fresh.memory_.keys, model.memory_.keys)
    with pytest.raises(InputError, match="other weights than those of the encoder given"):
        Classifier.load(tmp_path / "x.fw", encoder=encoder)


def test_settings_of_a_preparation_count() -> None:
    sources = {encoder_of(through, Scale(factor)).source for factor in (1, 2, 2, 3)}
    assert len(sources) == 3
    assert encoder_of(nn.Dropout(0.1)).source != encoder_of(nn.Dropout(0.2)).source
    assert encoder_of(functools.partial(through, network=nn.ReLU())).source != encoder_of(through).source
    matrices = [digests_of([Holding(array)])[0] for array in (np.eye(2), np.eye(2), np.zeros((2, 2)), torch.eye(2))]
    assert matrices[0] == matrices[1]
    assert len(set(matrices)) == 3


class Holding:
    def __init__(self, *held: Any) -> None:
        self.held = held


def test_what_is_no_setting_is_left_alone() -> None:
    """What differs from one program to the next, and what goes round in circles."""
    one, other = (Holding(threading.Lock(), logging.getLogger(name), np.sum, Path) for name in ("a", "b"))
    assert digests_of([one]) == digests_of([other])
    one.held = (one, {"self": one}, {3, "b", 2.5}, np.array([one, None]), torch.eye(2).to_sparse(), print)
    assert digests_of([one])[1] == ""


def test_an_installed_package_is_no_library_to_its_own_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it uses of itself is followed, what it uses of others is not."""
    for name, text in {
        "eyes/__init__.py": "from eyes.parts import see\n\ndef encode(items):\n    return see(items)\n",
        "eyes/parts.py": "import torch\nfrom other import tell\nNET = torch.nn.Linear(2, 3)\n\n"
        "def see(items):\n    return NET(tell(items))\n",
        "other.py": "SEEN = []\n\ndef tell(items):\n    SEEN.append(items)\n    return items\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(encoder_digests, "LIBRARIES", (*encoder_digests.LIBRARIES, tmp_path.resolve()))
    monkeypatch.syspath_prepend(tmp_path)
    eyes = importlib.import_module("eyes")
    parts, other = sys.modules["eyes.parts"], sys.modules["other"]
    before = digests_of([eyes.encode])
    other.SEEN.append(1)
    assert digests_of([eyes.encode]) == before
    nn.init.normal_(parts.NET.weight)
    source, weights = digests_of([eyes.encode])
    assert source == before[0]
    assert weights not in ("", before[1])
