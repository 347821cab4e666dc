"""Counting the kernels of a training step without a GPU: what is counted, and that no system needs many more."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

OPS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "ops.py"))


def test_kernels_are_counted_and_views_are_not() -> None:
    with OPS["Counted"]() as counted:
        x = torch.ones(4, 6)  # 1
        F.linear(x.view(2, 12).mT.unsqueeze(0)[0], torch.ones(3, 2), torch.ones(3))  # 2, and a product with its sum
        x.topk(2)
    assert counted.kernels.total() == 1 + 2 + 1 + OPS["SEVERAL"]["topk"]


def test_a_step_of_a_cell_by_phase() -> None:
    counted = OPS["count"]("omniglot-5way-1shot/matching-cnn")
    assert all(counted.of(phase) > 5 for phase in OPS["PHASES"])
    assert counted.of("optimiser") < 10  # one kernel for all parameters of a group
    assert 20 < counted.of("forward", encoder=True) < counted.of("forward")
    assert counted.of("backward", encoder=True) + counted.of("backward", encoder=False) == counted.of("backward")
    assert counted.kernels.total() < 200
    assert not torch.ones(1).is_cuda


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "most"),
    [
        ("omniglot-5way-1shot/maml-cnn", 800),
        ("omniglot-5way-1shot/metanet-cnn", 600),
        ("omniglot-5way-1shot/snail-cnn", 450),
        ("omniglot-5way-1shot/adacnn-df", 450),
        ("omniglot-20way-1shot/matching-cnn-fce", 550),
        ("mini-imagenet-5way-1shot/meta-lstm-cnn", 2600),
        ("ptb-5way-1shot/adalstm-gradient", 1800),
    ],
)
def test_a_step_needs_no_more_kernels_than_it_did(cell: str, most: int) -> None:
    assert OPS["count"](cell).kernels.total() <= most
