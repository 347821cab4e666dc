"""`Classifier` against scikit-learn's nearest neighbour and nearest centroid on the same keys, 5 to 10,000 classes.

    python benchmarks/classifier.py [--model drawings] [--classes 5 100 1000 10000]

Characters of `strokes` that no model was trained on (other seeds), one example and one query of each class, seen by a
shipped model; then one more example: added in place by ours, by fitting again by theirs. All in one run.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from fastweights import Classifier, bench
from fastweights.classifier.models import find_model
from fastweights.data import strokes

SEED = 1
"""Of the first other set of characters; models were trained on those of seed 0."""
QUERIES = 2000
"""The most queries that are asked."""


def drawings_of(classes: int) -> tuple[list[Image.Image], list[Image.Image]]:
    """One drawing of each of so many characters, and another one."""
    found: list[np.ndarray] = []
    seed = SEED
    while sum(len(some) for some in found) < classes:
        items = strokes.load(seed=seed).splits
        found += [split.values.numpy().reshape(-1, strokes.DRAWINGS, 28, 28)[:, :2] for split in items.values()]
        seed += 1
    pairs = np.concatenate(found)[:classes]
    return [Image.fromarray(pair[0]) for pair in pairs], [Image.fromarray(pair[1]) for pair in pairs]


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """The median of a few times."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(keys: np.ndarray, queries: np.ndarray, classes: int, repeats: int) -> list[dict[str, Any]]:
    """Lines for the record: accuracy and milliseconds of each method for so many classes."""
    labels = np.arange(classes)
    asked = np.linspace(0, classes - 1, min(classes, QUERIES)).astype(int)
    more, lines = keys[:1], []
    ours = Classifier().fit(keys[:classes], labels)
    theirs = {"KNeighborsClassifier": KNeighborsClassifier(1, metric="cosine"), "NearestCentroid": NearestCentroid()}
    for name, method in {"Classifier": ours, **theirs}.items():
        fit_ms = 1e3 * seconds(lambda method=method: method.fit(keys[:classes], labels), repeats)
        right = method.predict(queries[asked]) == asked
        predict_ms = 1e3 * seconds(lambda method=method: method.predict(queries[asked]), repeats)
        if method is ours:
            method.predict(queries[:1])
            add_ms = 1e3 * seconds(lambda: ours.add(0, more), 20)
        else:
            both, twice = np.concatenate([keys[:classes], more]), np.append(labels, 0)
            add_ms = 1e3 * seconds(lambda method=method, both=both, twice=twice: method.fit(both, twice), repeats)
        lines.append(
            {
                "job": "strokes, unseen characters, 1 example each",
                "classifier": name,
                "classes": classes,
                "accuracy": round(100 * float(right.mean()), 2),
                "fit_ms": round(fit_ms, 3),
                "predict_ms_per_query": round(predict_ms / len(asked), 5),
                "add_one_ms": round(add_ms, 3),
                "precision": "float32",
                "device": bench.device_name(torch.device("cpu")),
                "torch": torch.__version__,
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="drawings")
    parser.add_argument("--classes", type=int, nargs="+", default=[5, 100, 1000, 10_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    model = find_model(options.model)
    examples, queries = drawings_of(max(options.classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [_keys(model, some) for some in (examples, queries)]
    for classes in options.classes:
        for line in measure(*seen, classes, options.repeats):
            bench.append(options.out, [line])
            print(line, flush=True)


def _keys(model: Any, pictures: list[Image.Image]) -> np.ndarray:
    from fastweights.classifier.inputs import batches

    return np.concatenate([model.keys(batch.pixels) for batch in batches(pictures, model.preparation)])


if __name__ == "__main__":
    main()
