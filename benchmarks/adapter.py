"""What an adapter adds to the keys of a shipped model, on classes of mini-ImageNet that the adapter has not seen.

    python benchmarks/adapter.py [--model photos] [--each 30] [--record results/bench.jsonl] [--data-root ...]

Some pictures of each of the 100 classes become keys; the adapter is trained on three fifths of the classes, chosen by a
fifth and reported on the last. The shipped model may have been trained on all of them: see its card. What is measured
is what the adapter adds, not how well the model does on new classes.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from fastweights import bench, data
from fastweights.classifier import adapter
from fastweights.classifier.models import find_model

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="photos")
    parser.add_argument("--each", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    model, splits = find_model(given.model), data.load("mini-imagenet", given.data_root).splits
    keys, labels = [], []
    for split in splits.values():
        offsets = split.offsets.tolist()
        for name, first in zip(split.names, offsets, strict=False):
            pixels = split.values[first : first + given.each].numpy()
            keys += [model.keys(pixels[start : start + BATCH]) for start in range(0, len(pixels), BATCH)]
            labels += [name] * len(pixels)
    X, y, lines = np.concatenate(keys), np.array(labels), []
    for seed in range(given.seeds):
        start = time.perf_counter()
        _, measured = adapter.train(X, y, seed=seed)
        lines.append(
            {
                "job": "adapter above keys (mini-imagenet)",
                "model": given.model,
                "seed": seed,
                "pictures_of_a_class": given.each,
                "classes": measured["classes"],
                "without": measured["without"],
                "with": measured["with"],
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        both = [f"{lines[-1][which]['5way_1shot']} / {lines[-1][which]['5way_5shot']}" for which in ("without", "with")]
        print(f"seed {seed}: 1 / 5 shots, without {both[0]} %, with {both[1]} %, {lines[-1]['seconds']} s", flush=True)
    if given.record:
        bench.append(given.record, lines)


if __name__ == "__main__":
    main()
