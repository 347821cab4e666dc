"""Drawings: bars as long as their numbers, curves with readable axes."""

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from fastweights.experiments.report import figures
from fastweights.experiments.report.results import Measured, read_results
from fastweights.experiments.tables import ABLATION
from fastweights.learners.registry import PRESETS, LearnerSettings, build_learner
from fastweights.style import GREY
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.utils.errors import UserError

from ..conftest import made_up, write_ledger
from ..test_ledger import RESULTS


def test_bars_are_as_long_as_their_numbers(tmp_path):
    best, low = (3, 4, 5, 2), (2, 2, 3, 2)
    of_a_variant = made_up(right=low, variant=ABLATION[1].variant)
    path = write_ledger(tmp_path, made_up(right=best), made_up(right=low, recipe="paper"), of_a_variant)
    best = Measured((made_up(right=best)[0],))
    drawing = ElementTree.fromstring(figures.ablation_bars(read_results(path)))
    bars = [one.attrib for one in drawing if one.tag.endswith("rect")][1:]
    widths, scale = [float(bar["width"]) for bar in bars], figures.WIDTH / (70 + best.ci95 - 20)
    assert widths == pytest.approx([50 * scale, 25 * scale, 25 * scale], abs=0.06)
    assert [bar["fill-opacity"] for bar in bars] == ["1", "0.45", "1"]
    assert [bar["fill"] for bar in bars] == [ABLATION[0].colour, ABLATION[0].colour, ABLATION[1].colour]
    assert len({bar["y"] for bar in bars}) == 3
    texts = [one.text for one in drawing if one.tag.endswith("text")]
    assert texts[1:4] == [ABLATION[0].what, "70.00", "45.00"]
    lines = [one.attrib["d"] for one in drawing if one.tag.endswith("path")]
    first, last = re.findall(r"[MH]([\d.]+)", lines[0])
    assert float(last) - float(first) == pytest.approx(2 * best.ci95 * scale, abs=0.2)


def test_the_published_figure_is_small():
    assert (RESULTS / "ablation.svg").stat().st_size < 60_000
    ElementTree.fromstring((RESULTS / "ablation.svg").read_text())


def test_rules_have_colours_of_their_own():
    rules = ("hebb", "gradient", "gradient1", "normalised")
    assert len({figures._look(f"fwcnn-{rule}")[0] for rule in rules}) == len(rules)
    for_images = [name for name in PRESETS if "lstm" not in name and "resnet" not in name]
    alike = Counter(figures._look(name) for name in for_images)
    assert not [look for look, count in alike.items() if count > 2]  # a system and its variant at most
    assert len(set(figures.LOOKS.values())) == len(figures.LOOKS)
    assert figures._look("something new") == (GREY, ".")


def test_curves_that_look_the_same_have_dashes_of_their_own_and_log_scales_say_so():
    _, details = made_up()
    drawing = figures.learning_curves({"one": [(name, 1_000, details) for name in ("first", "second", "third")]})
    texts = re.findall(r"<!-- (.*?) -->", drawing)
    assert {"first", "second", "third", "one", "training tasks, log scale"} <= set(texts)
    dashes = set(re.findall(r"stroke-dasharray: ([\d., ]+)", drawing))
    assert len(dashes) == 2


def test_panels_are_as_large_however_many_curves_they_have(recwarn):
    """Names stand below a panel: without room for them they would cover the next one."""
    _, details = made_up()
    few, many = ([(str(number), 1_000, details) for number in range(count)] for count in (1, 40))
    heights = []
    for first in (few, many):
        drawing = figures.learning_curves({"1": first, "2": few, "3": few, "4": few})
        [corners] = re.findall(r'id="axes_2">\s*<g id="patch_2?\d*">\s*<path d="([^"]*)"', drawing)
        y = [float(pair.split()[1]) for pair in re.findall(r"[ML] (\S+ \S+)", corners)]
        heights.append(max(y) - min(y))
    assert not recwarn.list
    assert heights[0] > 100
    assert heights[1] == pytest.approx(heights[0], rel=0.2)


def test_the_picture_of_the_memory_explains_itself(dataset):
    learner = build_learner(LearnerSettings(item_shape=(8, 8, 1), filters=8)).eval()
    episode = EpisodeSampler(dataset.splits["test"], 3, 1, 2).draw(1, torch.Generator().manual_seed(0))
    texts = re.findall(r"<!-- (.*?) -->", figures.task_pca(learner, episode, "blobs, 3-way"))
    assert {"class A", "class B", "class C", "example", "query", "blobs, 3-way"} <= set(texts)
    shares = [int(found[1]) for text in texts if (found := re.match(r"\w+ principal axis, (\d+) % of the var", text))]
    assert len(shares) == 4
    assert shares[0] >= shares[1]
    assert shares[0] + shares[1] <= 100


def test_training_tasks_are_labelled_in_thousands():
    _, details = made_up()
    validation = [[step, 1.0, 50.0] for step in (100, 400)]
    train = [[step, 1.0, 0.5, 60.0] for step in (100, 400)]
    drawing = figures.learning_curves(
        {"one": [("a", 1_000, replace(details, curve={"validation": validation, "train": train}))]}
    )
    labels = re.findall(r"<!-- (\S+) -->", drawing)
    assert "300k" in labels
    assert not [label for label in labels if "10^" in label]


@pytest.mark.parametrize("placement", ["fc", "softmax"])
def test_a_task_is_drawn_in_the_memory(dataset, placement):
    learner = build_learner(LearnerSettings(item_shape=(8, 8, 1), filters=8, placement=placement)).eval()
    episode = EpisodeSampler(dataset.splits["test"], 5, 1, 3).draw(1, torch.Generator().manual_seed(0))
    assert figures.task_pca(learner, episode) == figures.task_pca(learner, episode)
    baseline = build_learner(LearnerSettings(system="prototypical", item_shape=(8, 8, 1), filters=8)).eval()
    with pytest.raises(UserError, match="needs a model with fast weights"):
        figures.task_pca(baseline, episode)
