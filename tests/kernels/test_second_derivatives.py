"""Whoever asks for second derivatives of what has only first ones is told so, and is not given zeros."""

import pytest
import torch
from torch.autograd import Function

from fastweights.kernels import (
    batch_norm,
    cnn_autograd,
    coordinate_lstm,
    coordinate_mlp,
    first_layer,
    learned_optimiser,
    lstm,
    mann,
    resnet,
    shifted,
    two_paths,
    weighted_l1,
)
from fastweights.learners import matching
from fastweights.nn import norms, recurrence

MODULES = (
    batch_norm, cnn_autograd, coordinate_lstm, coordinate_mlp, first_layer, learned_optimiser, lstm, mann, resnet,
    shifted, two_paths, weighted_l1, matching, norms, recurrence,
)  # fmt: skip
FUNCTIONS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Function) and value.__module__ == module.__name__
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_refused(name: str) -> None:
    with torch.enable_grad(), pytest.raises(RuntimeError, match="can be differentiated once only"):
        FUNCTIONS[name].backward(None, None)


def test_each_module_has_one() -> None:
    assert {name.rpartition(".")[0] for name in FUNCTIONS} == {module.__name__ for module in MODULES}
