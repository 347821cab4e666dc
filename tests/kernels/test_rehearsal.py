"""A rehearsal compiles kernels together and launches none; with stand-ins, since nothing compiles without a GPU."""

from contextlib import contextmanager

import pytest
import torch

from fastweights.kernels import rehearsal as rehearsing
from fastweights.kernels.rehearsal import rehearse

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

    def work():
        kernel[(7,)](1, BLOCK=2)
        assert not torch.autograd.is_multithreading_enabled()

    assert rehearse(work)
    assert modes == ["begun", "ended"]
    [(args, grid, warmup, options, compiled)] = seen
    assert (args, grid, warmup, options) == ((1,), (7,), True, {"BLOCK": 2})
    assert compiled.loaded
    assert jit.JITFunction.run is launch


@pytest.mark.parametrize("where", ["work", "compilation", "loading"])
def test_whatever_goes_wrong_only_means_that_nothing_was_rehearsed(monkeypatch, where):
    class Future:
        """As older versions of Triton have them: to be asked for the kernel."""

        def result(self):
            return Kernel() if where != "loading" else None

    @contextmanager
    def mode(threads):
        yield
        if where == "compilation":
            raise RuntimeError

    def launch(self, *args, grid, warmup, **options):
        return Future()

    def work():
        object.__new__(jit.JITFunction)[(7,)](1)
        if where == "work":
            raise AttributeError

    monkeypatch.setattr(jit.JITFunction, "run", launch)
    monkeypatch.setattr(rehearsing, "_compiling_mode", lambda: mode)
    assert not rehearse(work)
    assert jit.JITFunction.run is launch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_rehearsed():
    assert not rehearse(lambda: pytest.fail("there is nothing to compile"))
