"""Whether loading 4x4 windows once beats loading overlapping 3x3 patches (`kernels.WINDOWS`), on a GPU.

    python benchmarks/windows.py

First the kernels alone with several launch configurations, in microseconds per task of 80 images; then, with the
fastest of these, the whole job of `fastweights bench`. It records nothing: keep what won in `kernels.LAUNCH`.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fastweights import bench, kernels
from fastweights.layers import SLOPE

TASKS, IMAGES, FILTERS = 64, 80, 32
LAUNCHES = [*itertools.product((64, 128, 256), (4,), (1, 2, 3)), (32, 2, 2), (32, 4, 2), (128, 8, 2)]
KERNELS = {"first_forward": "first_window", "conv_pool": "conv_pool_window"}
"""What can be done by windows, and what its launch configuration is called then."""


def works(device: torch.device) -> dict[str, Callable[[], Any]]:
    """The first layer as in training and the second as in inference, on random inputs."""
    count = TASKS * IMAGES
    images = torch.randint(0, 256, (count, 84, 84, 3), dtype=torch.uint8, device=device)
    x = torch.randn(count, 42, 42, FILTERS, dtype=torch.bfloat16, device=device)
    first = torch.randn(FILTERS, 3, 3, 3, device=device)
    second = torch.randn(FILTERS, FILTERS, 3, 3, device=device)
    scale, shift = torch.rand(FILTERS, device=device), torch.randn(FILTERS, device=device)
    matrix = kernels.filter_matrix(first)
    return {
        "first_forward": lambda: kernels.first_forward(images, matrix, scale, shift, SLOPE, train=True),
        "conv_pool": lambda: kernels.further_layer_inference(x, second, scale, shift, SLOPE),
    }


def microseconds(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return 1000 * statistics.median(bench.time_runs(work, device, 3, seconds=0.02)) / TASKS


def tune(name: str, work: Callable[[], Any], device: torch.device) -> None:
    """Time a kernel as it is and by windows; leave the fastest launch configuration of the latter in place."""
    kernels.WINDOWS.discard(name)
    print(f"{name}: {microseconds(work, device):.1f} µs as it is, {kernels.LAUNCH[name]}", flush=True)
    kernels.WINDOWS.add(name)
    tried = {}
    for launch in LAUNCHES:
        kernels.LAUNCH[KERNELS[name]] = launch
        try:
            tried[launch] = microseconds(work, device)
        except Exception as error:  # too much shared memory, say: Triton has many names for it
            print(f"  {launch}: {type(error).__name__}")
    for launch in sorted(tried, key=lambda launch: tried[launch])[:6]:
        print(f"  by windows {tried[launch]:.1f} µs, {launch}", flush=True)
    kernels.LAUNCH[KERNELS[name]] = min(tried, key=lambda launch: tried[launch])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = torch.device("cuda")
    for name, work in works(device).items():
        tune(name, work, device)
    jobs = (bench.Job(tasks=128), bench.Job("omniglot", queries=10, tasks=256))
    for job, chosen in itertools.product(jobs, (set(), {"first_forward"}, {"conv_pool"}, set(KERNELS))):
        kernels.WINDOWS.clear()
        kernels.WINDOWS.update(chosen)
        line = bench.measure("fwcnn-hebb", job, device, "bfloat16", runs=3)
        rates = [f"{line[f'{what}_tasks_per_second']:,.0f} {what}" for what in ("train", "inference")]
        print(f"{job.name}, windows {sorted(chosen) or 'nowhere'}: {', '.join(rates)} tasks/s", flush=True)


if __name__ == "__main__":
    main()
