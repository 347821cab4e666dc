"""What an adapter adds to embeddings, on classes of mini-ImageNet that the adapter has not seen.

    python benchmarks/adapter.py [--of photos] [--each 30] [--record results/bench.jsonl] [--data-root ...]

Some pictures of each of the 100 classes become embeddings: keys of a shipped model (photos), raw pixels (pixels), keys
of a network that was never trained (untrained), or the vectors of an encoder of one's own (my_file.py:embed). The
adapter is worked out from three fifths of the classes, chosen by a fifth and reported on the last. A network may have
been trained on all of them: `photos` was. What is measured is what the adapter adds, not how well a network does on new
classes.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fastweights import bench, data
from fastweights.classifier import adapter
from fastweights.classifier.encoders import encoder_of
from fastweights.classifier.models import find_model
from fastweights.data.items import Items
from fastweights.learners.registry import LearnerSettings, build_learner

BATCH = 50
SIDE = 28
"""Pixels of a side of the pictures that are compared as such."""


def embedded(pixels: np.ndarray, of: str) -> np.ndarray:
    """Pictures (n, height, width, 3) as embeddings (n, features)."""
    if ":" in of:
        return np.concatenate([found for found, _ in encoder_of(of, None).encode(list(map(Image.fromarray, pixels)))])
    if of == "pixels":
        small = [np.asarray(Image.fromarray(one).resize((SIDE, SIDE))) for one in pixels]
        return np.stack(small).reshape(len(pixels), -1).astype(np.float32)
    if of == "untrained":
        torch.manual_seed(0)
        model = find_model(build_learner(LearnerSettings(item_shape=pixels.shape[1:])).eval())
    else:
        model = find_model(of)
    return np.concatenate([model.keys(pixels[first : first + BATCH]) for first in range(0, len(pixels), BATCH)])


def some_of(split: Items, each: int) -> tuple[np.ndarray, list[str]]:
    """So many pictures of each class, and the names of these classes."""
    first = split.offsets[:-1].tolist()
    pixels = np.concatenate([split.values[start : start + each].numpy() for start in first])
    return pixels, [name for name in split.names for _ in range(each)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default="photos")
    parser.add_argument("--each", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    parts = [some_of(split, given.each) for split in data.load("mini-imagenet", given.data_root).splits.values()]
    X = embedded(np.concatenate([pixels for pixels, _ in parts]), given.of)
    y = np.array([name for _, names in parts for name in names])
    lines = []
    for seed in range(given.seeds):
        start, busy = time.perf_counter(), time.process_time()
        _, measured = adapter.train(X, y, seed=seed)
        lines.append(
            {
                "job": "adapter above embeddings (mini-imagenet)",
                "embeddings": Path(given.of).name,
                "width": X.shape[1],
                "seed": seed,
                "pictures_of_a_class": given.each,
                **{name: measured[name] for name in ("classes", "chosen", "without", "with", "ece")},
                "seconds": round(time.perf_counter() - start, 1),
                "cpu_seconds": round(time.process_time() - busy, 1),
            }
        )
        both = [f"{lines[-1][which]['5way_1shot']} / {lines[-1][which]['5way_5shot']}" for which in ("without", "with")]
        print(
            f"seed {seed}: 1 / 5 shots, without {both[0]} %, with {both[1]} %, {lines[-1]['seconds']} s "
            f"({lines[-1]['cpu_seconds']} s of computing), covariances {measured['chosen']}",
            flush=True,
        )
    if given.record:
        bench.append(given.record, lines)


if __name__ == "__main__":
    main()
