"""The paper's numbers, spot-checked, and names that lead somewhere."""

import pytest

from fastweights.experiments.tables import ABLATION, MUST, ORACLE, STRETCH, TABLES, mean_of, parse_experiment, published
from fastweights.learners.fast_weights import PLACEMENTS
from fastweights.learners.registry import PRESETS


@pytest.mark.parametrize(
    ("experiment", "learner", "mean", "text"),
    [
        ("omniglot-5way-1shot", "fwcnn-hebb", 99.4, "99.4 ± 0.13"),
        ("omniglot-20way-5shot", "fwcnn-gradient1", 97.47, "97.47 ± 0.13"),
        ("omniglot-20way-1shot", "maml-cnn", 95.8, "95.8 ± 0.3"),
        ("mini-imagenet-5way-1shot", "fwcnn-hebb", 50.21, "50.21 ± 0.37"),
        ("mini-imagenet-5way-5shot", "fwresnet-hebb", 71.0, "71.00 ± 0.34"),
        ("mini-imagenet-5way-1shot", "matching-cnn", 43.6, "43.6"),
        ("ptb-5way-1shot-random", "lstm-fwmlp-hebb", 43.75, "43.75"),
        ("ptb-5way-3shot-all", "lstm-fwmlp-gradient1", 52.7, "52.7"),
    ],
)
def test_published_numbers(experiment, learner, mean, text):
    assert published(experiment, learner) == text
    assert mean_of(text) == mean


def test_nothing_is_published_of_what_is_ours_alone():
    assert published("omniglot-5way-1shot", "fwcnn-normalised") == ""
    assert published("omniglot-5way-1shot", "fwcnn-gradient") == ""
    assert published("ptb-5way-1shot-all", "matching-lstm") == ""


def test_every_cell_can_be_parsed_and_every_learner_exists():
    for table in TABLES.values():
        for experiment in table.experiments:
            parts = parse_experiment(experiment)
            assert "-".join(filter(None, (parts.training, parts.test))) == experiment
        for row in table.rows:
            assert row.learner in {"", ORACLE, *PRESETS}
            assert len(row.published) in (0, len(table.experiments))
            for experiment, text in zip(table.experiments, row.published, strict=False):
                assert table.published(row, experiment) == text
                assert text == "" or 20 < mean_of(text) < 100
                spread = text.partition(" ± ")[2]
                assert spread == "" or 0 < float(spread) < 2
    assert {bar.variant for bar in ABLATION} == {"", *PLACEMENTS} - {"fc"}
    assert {experiment for experiment, _ in STRETCH} == {e for table in TABLES.values() for e in table.experiments}


def test_every_number_to_be_reached_is_published():
    rows = [(table, row) for table in TABLES.values() for row in table.rows if row.learner.endswith(MUST)]
    numbers = [table.published(row, experiment) for table, row in rows for experiment in table.experiments]
    assert len(numbers) == 28
    assert all(numbers)
