"""What is freed stays with the process, so that the next step need not ask the system for it."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from fastweights.utils.memory import keep_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(48 * 2**18)  # 48 MiB, more than the C library keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults(5)
assert keep_freed_memory()
faults(20)  # until there is a place for it
print(given_back, faults(5))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 5
