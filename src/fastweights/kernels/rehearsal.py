"""Kernels compiled together, before they are wanted.

Triton compiles a kernel when it is first launched, one after another: on a fresh machine that takes most of the time
before a first step. In a rehearsal the work is gone through once with nothing launched, while threads compile its
kernels.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fastweights.kernels.available import has_triton


def rehearse(work: Callable[[], object]) -> bool:
    """Go through a work with Triton's kernels compiled and not launched: they write nothing, so it computes garbage.

    Only for work that takes the same course whatever the numbers are. Whatever goes wrong, be it Triton's doing or the
    work's, only means that kernels are compiled when they are wanted; whether all went well is the answer.
    """
    compile_together = _compiling_mode()
    if compile_together is None:
        return False
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads, _held_back() as kernels:
            # Backward passes stay on this thread, which is the one that has its kernels compiled by others.
            with compile_together(threads), torch.autograd.set_multithreading_enabled(False):
                work()
                importlib.import_module("torch._dynamo")  # for optimisers: seconds, better spent while threads compile
            _load_all(kernels, threads)
    except Exception:  # the work itself will say what is wrong with it
        return False
    return True


def _compiling_mode() -> Any:
    """Triton's mode of compiling in threads; None where there is none."""
    if not (has_triton() and torch.cuda.is_available()):
        return None
    import triton

    return getattr(triton, "AsyncCompileMode", None)


@contextmanager
def _held_back() -> Iterator[list[Any]]:
    """Have no kernel launched; those that would have been are in the list."""
    from triton.runtime.jit import JITFunction

    launch, kernels = JITFunction.run, list[Any]()

    def hold_back(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = hold_back
    try:
        yield kernels
    finally:
        JITFunction.run = launch


def _load_all(kernels: list[Any], threads: Executor) -> None:
    """Bring kernels to the GPU, with the code that launches them, which may have to be compiled, too."""

    def load(kernel: Any) -> None:
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        _ = compiled.run

    list(threads.map(load, kernels))
