"""How well a folder of one's own pictures is told apart from one and from five examples of each class.

    python benchmarks/own_pictures.py FOLDER [--of photos] [--draws 40] [--record results/bench.jsonl]

FOLDER holds a folder of pictures for each class. `--of` is a model, or an encoder, my_file.py:embed. Examples are drawn
at random, all other pictures are asked, many times over.
"""

import argparse
from pathlib import Path

import numpy as np

from fastweights import Classifier, bench
from fastweights.classifier.calibration import expected_calibration_error
from fastweights.classifier.folders import labelled_pictures

SHOTS = (1, 5)


def answered(model: Classifier, keys: np.ndarray, labels: np.ndarray, shots: int, draw: int) -> tuple[float, ...]:
    """Accuracy, mean confidence and calibration error of one draw of examples."""
    rng = np.random.default_rng([shots, draw])
    members = [rng.permutation(np.flatnonzero(labels == label))[:shots] for label in np.unique(labels)]
    examples = np.concatenate(members)
    for label in model.classes_.tolist():
        model.forget(label)
    model.add_keys(keys[examples], labels[examples].tolist())
    rest = np.setdiff1d(np.arange(len(labels)), examples)
    best = [answer.likely[0] for answer in model.predict_keys(keys[rest], 1, 1)]
    right = np.array([one.label for one in best]) == labels[rest]
    sure = np.array([one.probability for one in best])
    return float(right.mean()), float(sure.mean()), expected_calibration_error(sure, right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", default="photos")
    parser.add_argument("--called", help="what the pictures are called in the record")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    groups = labelled_pictures(given.folder)
    seen_by = {"encoder": given.of, "cache": given.cache} if ":" in given.of else {"model": given.of}
    model = Classifier(**seen_by).fit({label: files[:1] for label, files in groups.items()})
    keys = model.encode([file for files in groups.values() for file in files])
    labels = np.array([label for label, files in groups.items() for _ in files])
    lines = []
    for shots in SHOTS:
        found = np.array([answered(model, keys, labels, shots, draw) for draw in range(given.draws)])
        accuracy, confidence, error = found.mean(0)
        spread = 1.96 * found[:, 0].std(ddof=1) / len(found) ** 0.5
        lines.append(
            {
                "job": f"own pictures ({given.called or given.folder.name})",
                "of": Path(given.of).name,
                "pictures": len(labels),
                "classes": len(groups),
                "examples_of_a_class": shots,
                "accuracy": round(100 * accuracy, 2),
                "ci95_over_draws": round(100 * spread, 2),
                "confidence": round(confidence, 4),
                "ece": round(error, 4),
            }
        )
        print(
            f"{given.of}, {shots} of each: {100 * accuracy:.1f} ± {100 * spread:.1f} % right, mean confidence "
            f"{confidence:.2f}, calibration error {error:.3f}"
        )
    if given.record:
        bench.append(given.record, lines)


if __name__ == "__main__":
    main()
