"""Drawings show what they say: the numbers that reach the axes are those of the models and the ledger."""

import matplotlib.axes
import matplotlib.figure
import pytest
import torch
from experiments.conftest import made_up
from support import blobs

from fastweights.experiments.report import figures
from fastweights.learners import build_learner
from fastweights.learners.examples import PixelNearestNeighbour
from fastweights.learners.fast_weights import part
from fastweights.learners.registry import LearnerSettings
from fastweights.pictures import draw_task
from fastweights.tasks.episodes import EpisodeSampler

SETTINGS = LearnerSettings(item_shape=(8, 8, 1), filters=8)


@pytest.fixture
def drawn(monkeypatch):
    """All calls of methods of axes that draw, by name: their positional arguments."""
    calls = {name: [] for name in ("barh", "plot", "scatter", "set_title", "set_xlabel")}
    for name, record in calls.items():
        original = getattr(matplotlib.axes.Axes, name)

        def wrapped(self, *args, _record=record, _original=original, **options):
            _record.append((args, options))
            return _original(self, *args, **options)

        monkeypatch.setattr(matplotlib.axes.Axes, name, wrapped)
    return calls


@pytest.fixture
def task(dataset):
    return EpisodeSampler(dataset.splits["test"], 5, 1, 3).draw(1, torch.Generator().manual_seed(0))


def test_ticks_and_scores_are_of_the_answers(task, tmp_path, drawn):
    learner = build_learner(SETTINGS).eval()
    answers = learner.predict(learner.describe(task.support_x, task.support_y), task.query_x)[0].argmax(-1)
    right = answers == task.query_y[0]
    assert 0 < right.sum() < len(right)
    assert draw_task(learner, task, tmp_path / "a $ and a $.png", "5 $ or 6 $") == pytest.approx(right.float().mean())
    titles = [args[0] for args, _ in drawn["set_title"]]
    assert sum("✓" in title for title in titles) == right.sum()
    assert sum("✗" in title for title in titles) == (~right).sum()


def test_names_stand_below_what_is_shown_shortened(task, tmp_path, drawn):
    names = ["cat", r"$\no formula$", "Käfer", "a/very/long/name/of/a/character08", "a/very/long/name/of/a/character09"]
    draw_task(PixelNearestNeighbour(), task, tmp_path / "task.png", names=names)
    shown = [args[0] for args, _ in drawn["set_xlabel"]]
    assert shown == [*names[:3], "a/very/long/n…a/character08", "a/very/long/n…a/character09"]


@pytest.mark.parametrize(("way", "name"), [(5, "猫"), (50, "cat")])
def test_names_that_cannot_be_read_are_left_out(tmp_path, drawn, way, name):
    task = EpisodeSampler(blobs(50, 2, 0), way, 1, 1).draw(1)
    draw_task(PixelNearestNeighbour(), task, tmp_path / "task.png", names=[name] * way)
    assert drawn["set_xlabel"] == []


def test_curves_go_through_the_points_of_the_record(drawn):
    _, details = made_up()
    figures.learning_curves({"a": [("fwcnn-hebb (best)", 4, details)]})
    (train, _), (validation, _) = drawn["plot"]
    assert train[:2] == ([40, 80], [30.0, 45.0])
    assert validation[:2] == ([40, 80], [33.0, 61.5])


@pytest.mark.parametrize("placement", ["fc", "softmax"])
def test_a_tasks_keys_and_read_outs_are_on_their_principal_axes(task, placement, drawn):
    """Along each axis the points are as spread as the singular value of the centred keys, or read-outs, says."""
    learner = build_learner(LearnerSettings(item_shape=(8, 8, 1), filters=8, placement=placement)).eval()
    with torch.no_grad():
        keys = learner.embed(torch.cat([task.support_x, task.query_x], 1))
        trace = part(learner.describe(task.support_x, task.support_y), "hidden" if placement == "fc" else "output")
        layer, inputs = (learner.hidden, keys) if placement == "fc" else (learner.output, learner.hidden(keys, {}))
        answers = layer.read(trace, inputs)[0].double()
        keys = keys[0].double()
    figures.task_pca(learner, task, "costs $5 to $6")
    points = torch.tensor([place for (xs, ys), _ in drawn["scatter"] for place in zip(xs, ys, strict=True)])
    points = points.double()
    for drawn_points, values in zip(points.split(len(keys)), (keys, answers), strict=True):
        spectrum = torch.linalg.svdvals(values - values.mean(0))
        torch.testing.assert_close(drawn_points.norm(dim=0), spectrum[:2], rtol=1e-5, atol=1e-6)
