"""Memory on a CPU: what one step frees is kept for the next."""

import ctypes
import functools

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`."""
LARGEST = 2**31 - 1
"""The largest number that it takes."""


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep large blocks of memory that are freed, from now on; whether it can.

    By default it gives them back to the system, which hands out pages of zeros at the next step, one page at a time: a
    sixth of the time of a training step.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc
        return False
    return bool(set_option(TRIM_THRESHOLD, LARGEST) and set_option(MMAP_MAX, 0))
