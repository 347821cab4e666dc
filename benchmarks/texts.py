"""Topics from a few texts each: `Classifier("texts")` against scikit-learn on TF-IDF, 1 to 8 examples per class.

    apt-get install fortunes
    python benchmarks/texts.py [--folder /usr/share/games/fortunes] [--record results/bench.jsonl]
    python benchmarks/texts.py --calibrate

A topic is a file of Debian's package `fortunes`, a text one of its sayings. All topics with enough of them are told
apart at once, and five at a time. Every second saying is left out: on those the calibration of the model was set
(`--calibrate` prints it). The lengths of n-grams were chosen on all sayings, which may flatter our numbers a little.
TF-IDF is fitted to the examples, as is all that it stands below.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer

from fastweights import Classifier, bench
from fastweights.classifier.calibration import expected_calibration_error
from fastweights.classifier.packing import calibrate
from fastweights.classifier.texts import hashed_texts
from fastweights.data.items import Items

SHOTS, QUERIES, FEWEST = (1, 2, 4, 8), 10, 60
TASKS = {5: 100, 0: 10}
"""Draws of so many topics; 0 stands for all of them."""


def topics_in(folder: Path) -> dict[str, list[str]]:
    """The sayings of each file that has enough, each once."""
    found = {}
    for file in sorted(folder.iterdir()):
        if file.suffix or file.is_symlink() or not file.is_file():
            continue
        sayings = [saying.strip() for saying in file.read_text("utf-8", "replace").split("\n%\n")]
        sayings = [saying for saying in dict.fromkeys(sayings) if any(letter.isalpha() for letter in saying)]
        if len(sayings) >= FEWEST:
            found[file.name] = sayings
    return found


def dense(matrix: Any) -> Any:
    return matrix.toarray()


def methods() -> dict[str, Callable[[], Any]]:
    def tfidf(model: Any) -> Pipeline:
        return make_pipeline(TfidfVectorizer(sublinear_tf=True), FunctionTransformer(dense, accept_sparse=True), model)

    return {
        "Classifier(texts)": lambda: Classifier("texts"),
        "TF-IDF + NearestCentroid": lambda: tfidf(NearestCentroid()),
        "TF-IDF + LogisticRegression": lambda: tfidf(LogisticRegression(max_iter=200)),
    }


def measure(topics: dict[str, list[str]], way: int, shots: int) -> list[dict[str, Any]]:
    """Lines for the record: accuracy of each method on the same draws."""
    right: dict[str, list[float]] = {name: [] for name in methods()}
    seconds = dict.fromkeys(right, 0.0)
    confidence, was_right = [], []
    rng = np.random.default_rng([way, shots])
    for _ in range(TASKS[way]):
        names = rng.permutation(sorted(topics))[: way or None]
        drawn = {name: rng.permutation(topics[name])[: shots + QUERIES].tolist() for name in names}
        X = [text for name in names for text in drawn[name][:shots]]
        y = [str(name) for name in names for _ in range(shots)]
        asked = [text for name in names for text in drawn[name][shots:]]
        answers = np.repeat(names, QUERIES)
        for name, make in methods().items():
            start = time.perf_counter()
            model = make().fit(X, y)
            found = model.predict(asked)
            seconds[name] += time.perf_counter() - start
            right[name].append(float((found == answers).mean()))
            if name == "Classifier(texts)":
                confidence.append(model.predict_proba(asked).max(1))
                was_right.append(found == answers)
    ece = expected_calibration_error(np.concatenate(confidence), np.concatenate(was_right))
    return [
        {
            "job": "topics of texts (fortunes)",
            "method": name,
            "topics": way or len(topics),
            "examples": shots,
            "accuracy": round(100 * float(np.mean(of)), 2),
            "ci95": round(196 * float(np.std(of)) / len(of) ** 0.5, 2),
            "draws": len(of),
            "ms": round(1000 * seconds[name] / len(of), 1),
            **({"ece": round(ece, 4)} if name == "Classifier(texts)" else {}),
        }
        for name, of in right.items()
    ]


def calibration(topics: dict[str, list[str]]) -> dict[str, Any]:
    """How sure hashed texts may be, set on the sayings that are not measured."""
    some = {name: texts[:200] for name, texts in topics.items()}
    flat = [text for texts in some.values() for text in texts]
    vectors = np.concatenate([found for found, _ in hashed_texts().encode(flat)])
    offsets = np.concatenate([[0], np.cumsum([len(texts) for texts in some.values()])])
    keys = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return calibrate(keys, Items(torch.zeros(len(keys)), torch.from_numpy(offsets))).to_json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/usr/share/games/fortunes"))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    given = parser.parse_args()
    if not given.folder.is_dir():
        parser.error(f"{given.folder} does not exist; apt-get install fortunes")
    warnings.simplefilter("ignore")  # scikit-learn wonders about one example per class
    topics = topics_in(given.folder)
    if given.calibrate:
        print(calibration({name: texts[::2] for name, texts in topics.items()}))
        return
    measured = {name: texts[1::2] for name, texts in topics.items()}
    lines = [line for way in TASKS for shots in SHOTS for line in measure(measured, way, shots)]
    for line in lines:
        of = f"{line['topics']:3} topics, {line['examples']} each  {line['method']:28}"
        print(f"{of} {line['accuracy']:6.2f} ± {line['ci95']:.2f} %  {line['ms']:8.1f} ms  {line.get('ece', '')}")
    if given.record:
        bench.append(given.record, lines)


if __name__ == "__main__":
    main()
