"""Kernels compiled together, before they are wanted.

Triton compiles a kernel when it is first launched, one after another: on a fresh machine that takes most of the time
before a first step. In a rehearsal the work is gone through once with nothing launched, while threads compile its
kernels.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fastweights.kernels.available import has_triton


@contextmanager
def rehearsal() -> Iterator[None]:
    """Within, Triton's kernels are compiled and not launched: what they should have written is whatever was in memory.

    Only for work that takes the same course whatever the numbers are. Backward passes stay on this thread, which is the
    one whose kernels are held back.
    """
    compile_together = _compiling_mode()
    if compile_together is None:
        yield
        return
    from triton.runtime.jit import JITFunction

    launch, kernels = JITFunction.run, []

    def hold_back(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **options))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        JITFunction.run = hold_back
        try:
            with compile_together(threads), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            JITFunction.run = launch
        list(threads.map(_load, kernels))


def _compiling_mode() -> Any:
    """Triton's mode of compiling in threads; None where there is none."""
    if not (has_triton() and torch.cuda.is_available()):
        return None
    import triton

    return getattr(triton, "AsyncCompileMode", None)


def _load(kernel: Any) -> None:
    """Bring a kernel to the GPU, with the code that launches it, which may have to be compiled, too."""
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    _ = kernel.run
