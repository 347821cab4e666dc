"""When the fused kernels of images are used: judged without a GPU, by something that says it is on one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastweights.kernels import available
from fastweights.kernels.available import can_be_fused

BYTES, HALVES = SimpleNamespace(is_cuda=True, dtype=torch.uint8), SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _in_bfloat16_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(available, "has_triton", lambda: True)


def norms(*training: bool) -> list[nn.Module]:
    return [nn.BatchNorm2d(4).train(each) for each in training]


def test_bytes_and_with_a_word_halves() -> None:
    assert can_be_fused(BYTES, *norms(True))
    assert can_be_fused(HALVES, *norms(True), dtype=torch.bfloat16)
    assert not can_be_fused(HALVES, *norms(True))
    assert not can_be_fused(SimpleNamespace(is_cuda=False, dtype=torch.uint8), *norms(True))


def test_norms_are_all_in_one_mode_and_none_is_of_another_kind() -> None:
    """The kernels ask one norm for all: with some of them frozen in eval mode these would be trained all the same."""
    assert can_be_fused(BYTES, *norms(True, True, True))
    assert not can_be_fused(BYTES, *norms(True, True, False))
    assert not can_be_fused(BYTES, *norms(True, True), nn.GroupNorm(1, 4))


def test_no_gradients_in_eval_mode() -> None:
    assert not can_be_fused(BYTES, *norms(False, False))
    with torch.no_grad():
        assert can_be_fused(BYTES, *norms(False, False))
        assert not can_be_fused(BYTES, *norms(False, True))
