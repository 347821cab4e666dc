"""A rehearsal compiles kernels together and launches none; with stand-ins, since nothing compiles without a GPU."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fastweights.kernels import rehearsal as rehearsing
from fastweights.kernels.rehearsal import rehearsal

jit = pytest.importorskip("triton.runtime.jit")


class Kernel:
    """What a launch returns: it is on the GPU once `run` has been asked for."""

    loaded = False

    @property
    def run(self):
        self.loaded = True


def test_kernels_are_compiled_and_loaded_but_not_launched(monkeypatch):
    seen, modes = [], []

    def launch(self, *args, grid, warmup, **options):
        seen.append((args, grid, warmup, options, Kernel()))
        return seen[-1][-1]

    @contextmanager
    def mode(threads):
        modes.append("begun")
        yield
        modes.append("ended")

    monkeypatch.setattr(jit.JITFunction, "run", launch)
    monkeypatch.setattr(rehearsing, "_compiling_mode", lambda: mode)
    kernel = object.__new__(jit.JITFunction)
    with rehearsal():
        kernel[(7,)](1, BLOCK=2)
        assert not torch.autograd.is_multithreading_enabled()
    assert modes == ["begun", "ended"]
    [(args, grid, warmup, options, compiled)] = seen
    assert (args, grid, warmup, options) == ((1,), (7,), True, {"BLOCK": 2})
    assert compiled.loaded
    assert jit.JITFunction.run is launch
    with pytest.raises(ZeroDivisionError), rehearsal():
        _ = 1 / 0
    assert jit.JITFunction.run is launch


def test_without_a_gpu_it_is_no_rehearsal():
    weights = nn.Parameter(torch.ones(2))
    with rehearsal():
        weights.sum().backward()
    assert torch.equal(weights.grad, torch.ones(2))
