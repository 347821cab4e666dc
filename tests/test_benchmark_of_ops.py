"""Counting the kernels of a training step, and their bytes, without a GPU: what is counted, and that no system needs
many more."""

import runpy
from collections.abc import Callable
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


def moved(work: Callable[[], object]) -> tuple[int, int]:
    """The bytes of all operations, and of strided copies."""
    with OPS["Counted"]() as counted:
        work()
    return counted.bytes.total(), counted.strided.total()


def test_bytes_are_those_of_tensors_read_and_written() -> None:
    x, y = torch.ones(4, 6), torch.ones(6, 5)
    assert moved(lambda: x @ y) == (4 * (24 + 30 + 20), 0)
    assert moved(lambda: x[:, :2].sum()) == (4 * (8 + 1), 0)  # of a view, what it shows
    assert moved(lambda: x[:1].expand(100, 6) + 1) == (4 * (6 + 600), 0)  # what is repeated is read once
    assert moved(lambda: torch.zeros_like(x)) == (4 * 24, 0)
    assert moved(lambda: x.add_(1)) == (4 * 48, 0)
    assert moved(lambda: y[torch.tensor([1, 2])])[0] < 4 * 30  # of a table, what is picked


def test_copies_into_another_order_are_strided() -> None:
    x, place = torch.ones(4, 6), torch.empty(4, 6)
    copied = 2 * 4 * 24
    assert moved(lambda: x.mT.contiguous()) == (copied, copied)
    assert moved(lambda: x.mT.clone()) == moved(lambda: place.copy_(x)) == (copied, 0)
    assert moved(lambda: place[:, ::2].copy_(x[:, :3])) == (copied // 2, copied // 2)


def test_a_step_of_a_cell_by_phase() -> None:
    counted = OPS["count"]("omniglot-5way-1shot/matching-cnn")
    assert all(counted.of(phase) > 5 for phase in OPS["PHASES"])
    assert counted.of("optimiser") < 10  # one kernel for all parameters of a group
    assert 20 < counted.of("forward", encoder=True) < counted.of("forward")
    assert counted.of("backward", encoder=True) + counted.of("backward", encoder=False) == counted.of("backward")
    assert counted.kernels.total() < 200
    assert 100e6 < counted.bytes.total() < 1e9
    assert not torch.ones(1).is_cuda


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "most"),
    [
        ("omniglot-5way-1shot/maml-cnn", 260),
        ("omniglot-5way-1shot/metanet-cnn", 600),
        ("omniglot-5way-1shot/snail-cnn", 450),
        ("omniglot-5way-1shot/adacnn-df", 450),
        ("omniglot-20way-1shot/matching-cnn-fce", 550),
        ("mini-imagenet-5way-1shot/meta-lstm-cnn", 1350),
        ("ptb-5way-1shot/adalstm-gradient", 1800),
    ],
)
def test_a_step_needs_no_more_kernels_than_it_did(cell: str, most: int) -> None:
    assert OPS["count"](cell).kernels.total() <= most
