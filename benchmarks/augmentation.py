"""Augmentation on a GPU: what PyTorch's passes take, what the one kernel takes, and how best to launch it.

    python benchmarks/augmentation.py

A mini-ImageNet step of 64 tasks is 5,120 images. The changes are drawn beforehand, so that resampling alone is timed;
*augment* includes drawing, as in a training step. The fastest launch belongs into `kernels.resample.LAUNCH`.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastweights import bench
from fastweights.kernels.available import has_triton
from fastweights.tasks.augment import augment, draw_changes, plain_resample

JOBS: tuple[tuple[tuple[int, int, int, int], tuple[str, ...]], ...] = (
    ((5120, 84, 84, 3), ("flip", "crop")),
    ((5120, 84, 84, 3), ("flip", "crop", "jitter")),
    ((5120, 84, 84, 3), ("flip", "resized-crop", "jitter")),
    ((3520, 28, 28, 1), ("affine",)),
)
LAUNCHES = tuple((block, warps) for block in (128, 256, 512, 1024, 2048) for warps in (2, 4, 8) if block >= 32 * warps)


def time_job(shape: tuple[int, ...], names: tuple[str, ...], runs: int, seconds: float) -> None:
    from fastweights.kernels import resample as resampling  # deferred: needs Triton

    device = torch.device("cuda")
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    maps, _, colours, mode = draw_changes(images, names)

    def milliseconds(work: Callable[[], Any]) -> float:
        return statistics.median(bench.time_runs(bench.captured(work, device), device, runs, seconds))

    plain = milliseconds(lambda: plain_resample(images, maps, None, colours, mode))
    whole = milliseconds(lambda: augment(images, names))
    times = {
        launch: milliseconds(lambda launch=launch: resampling.resample(images, maps, None, colours, mode, launch))
        for launch in {resampling.LAUNCH[mode]: None, **dict.fromkeys(LAUNCHES)}
    }
    now, best = resampling.LAUNCH[mode], min(times, key=times.__getitem__)
    print(f"{'x'.join(map(str, shape))} {'+'.join(names)}, {mode}")
    print(f"  plain {plain:.3f} ms, kernel {times[now]:.3f} ms ({plain / times[now]:.1f} times as fast), ", end="")
    print(f"augment {whole:.3f} ms; both ways {2 * images.numel() / 1e6:.0f} MB of bytes")
    for (block, warps), ms in times.items():
        notes = [note for note, launch in (("in use", now), ("fastest", best)) if launch == (block, warps)]
        print(f"  {block:5} pixels, {warps} warps: {ms:.3f} ms {', '.join(notes)}".rstrip(), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="how long a run is, about")
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() and has_triton()):
        print("This benchmark needs a CUDA device and Triton: there is nothing to time here.", file=sys.stderr)
        sys.exit(2)
    print(f"{bench.device_name(torch.device('cuda'))}, torch {torch.__version__}")
    for shape, names in JOBS:
        time_job(shape, names, options.runs, options.seconds)


if __name__ == "__main__":
    main()
