"""From the ledger to the numbers of the tables: means over seeds, and differences paired by task."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fastweights.experiments.report.results import Measured, Results, by_group, paired

from ..conftest import made_up


def test_a_paired_difference_by_hand():
    first, second = np.array([1.0, 0.8, 0.6, 0.8]), np.array([0.8, 0.8, 0.2, 0.6])
    found = paired([(first, second)])  # differences 0.2, 0, 0.4, 0.2: mean 0.2, variance 0.08 / 3
    assert found.mean == pytest.approx(20.0)
    assert found.ci95 == pytest.approx(100 * 1.96 * math.sqrt(0.08 / 3) / 2)
    assert (found.tasks, found.seeds) == (4, 1)


def test_seeds_are_averaged_within_each_task_and_common_tasks_are_taken():
    nothing = np.array([0.0, 0.0, 0.0])
    found = paired([(np.array([1.0, 0.0]), nothing), (np.array([0.0, 0.0, 1.0]), nothing)])
    assert (found.mean, found.tasks, found.seeds) == (25.0, 2, 2)
    assert paired([]) is None


def test_only_the_same_seeds_and_data_are_compared():
    hebb, other = made_up(), made_up(right=(2, 4, 5, 1), learner="fwcnn-gradient")
    results = Results((), {}, {hebb[0].key: hebb[1], other[0].key: other[1]})
    assert results.compare(Measured((hebb[0],)), Measured((other[0],))).mean == pytest.approx(10.0)
    elsewhere = made_up(seed=1, learner="fwcnn-gradient")
    assert results.compare(Measured((hebb[0],)), Measured((elsewhere[0],))) is None
    assert Results((), {}, {}).compare(Measured((hebb[0],)), Measured((other[0],))) is None
    assert results.compare_with_centroid(Measured((hebb[0],))).mean == pytest.approx(10.0)
    assert Results((), {}, {}).compare_with_centroid(Measured((hebb[0],))) is None


def test_a_number_shows_the_interval_of_its_tasks_and_the_deviation_of_its_seeds():
    first, second = made_up()[0], made_up(right=(5, 5, 5, 5), seed=1)[0]
    assert Measured((first,)).text == "70.00 ± 25.30 (1 seed)"
    [both] = by_group([first, second]).values()
    assert both.text == "85.00 ± 12.65 (2 seeds, sd 21.21)"
    assert both.command == "fastweights reproduce mini-imagenet-5way-1shot/fwcnn-hebb --recipe best --seeds 2"


def test_answers_that_depend_on_other_queries_are_marked_transductive():
    line = replace(made_up()[0], config={"learner": {"system": "maml", "batch_norm": 5}, "training": {}})
    assert Measured((line,)).text == "70.00 ± 25.30 (1 seed; transductive)"
    by_itself = replace(line, config={"learner": {"system": "maml", "batch_norm": 0}, "training": {}})
    assert not by_itself.transductive


def test_runs_on_other_data_are_not_compared_task_by_task():
    (first, of_first), (second, of_second) = made_up(), made_up(learner="fwcnn-gradient")
    results = Results((), {}, {of_first.key: of_first, of_second.key: of_second})
    assert results.compare(Measured((first,)), Measured((second,))) is not None
    assert results.compare(Measured((first,)), Measured((replace(second, data_hash="other"),))) is None
