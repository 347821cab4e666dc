"""Whether Triton is installed, and what convolution kernels need."""

import functools
import importlib.util

ALIGNED = 8
"""Channels are padded to a multiple of this for tensor cores: 3 colours and 5 zeros are convolved faster than 3."""


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
