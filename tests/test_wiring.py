"""Every setting and every seed reaches the part it is meant for, and no other."""

from dataclasses import replace

import pytest
import torch

from fastweights.data.items import Items
from fastweights.episodes import EvaluationTasks
from fastweights.learners import build_learner
from fastweights.pretraining import Pretraining
from fastweights.rules import Normalised
from fastweights.settings import OF_ENCODER, OF_SYSTEM, LearnerSettings
from fastweights.training import Training


@pytest.fixture
def pretrained(train_settings):
    return replace(train_settings, steps=1, pretrain_steps=1, pretrain_batch=16)


def pretraining_of(training: Training) -> Pretraining:
    return Pretraining(training.learner, training.head, training.items["train"], training.settings, graph=False)


def answered(questions: EvaluationTasks) -> torch.Tensor:
    return torch.cat(list(questions))


@pytest.fixture
def drawn(monkeypatch):
    """Whatever is fetched from a dataset: positions, one tensor a call."""
    gather, fetched = Items.gather, []

    def recorded(self, positions):
        fetched.append(positions.flatten())
        return gather(self, positions)

    monkeypatch.setattr(Items, "gather", recorded)
    return fetched


def drawn_in(work, drawn) -> list[int]:
    """The positions that are fetched while something is done."""
    drawn.clear()
    work()
    return torch.cat(drawn).tolist()


@pytest.mark.parametrize("split", ["val", "test"])
def test_every_seed_answers_the_same_tasks(dataset, learner_settings, train_settings, split):
    first, second = (Training(learner_settings, replace(train_settings, seed=s), dataset) for s in (0, 1))
    assert torch.equal(answered(first.questions[split]), answered(second.questions[split]))


IMAGES = {"item_shape": (8, 8, 1), "filters": 8, "layers": 3, "batch_norm": 3}
RESNET = {"encoder": "resnet", "item_shape": (8, 8, 1), "blocks": (4, 6), "features": 8}
SENTENCES = {"encoder": "lstm", "item_shape": (7,), "vocabulary": 20, "embedding": 4, "units": 6, "layers": 2}
MAML = {**IMAGES, "system": "maml"}
REACHED = {
    ("cnn", "layers"): (IMAGES, 4, lambda learner: len(learner.encoder.convolutions)),
    ("cnn", "filters"): (IMAGES, 9, lambda learner: learner.encoder.convolutions[1].out_channels),
    ("cnn", "batch_norm"): (IMAGES, 2, lambda learner: len(learner.encoder.norms)),
    ("cnn", "conv_bias"): (IMAGES, True, lambda learner: learner.encoder.convolutions[0].bias is not None),
    ("resnet", "blocks"): (
        RESNET,
        (5, 7, 9),
        lambda learner: tuple(len(b.shortcut.weight) for b in learner.encoder.blocks),
    ),
    ("resnet", "features"): (RESNET, 11, lambda learner: learner.encoder.mix.out_channels),
    ("resnet", "features_norm"): (
        RESNET,
        False,
        lambda learner: isinstance(learner.encoder.norm, torch.nn.BatchNorm2d),
    ),
    ("resnet", "dropout"): (RESNET, 0.3, lambda learner: learner.encoder.blocks[1].dropout.p),
    ("lstm", "layers"): (SENTENCES, 3, lambda learner: learner.encoder.ahead.num_layers),
    ("lstm", "embedding"): (SENTENCES, 5, lambda learner: learner.encoder.embedding.embedding_dim),
    ("lstm", "units"): (SENTENCES, 7, lambda learner: learner.encoder.ahead.hidden_size),
    ("lstm", "readout"): (SENTENCES, "blank", lambda learner: "blank" if learner.encoder.at_blank else "end"),
    ("lstm", "bidirectional"): (SENTENCES, True, lambda learner: learner.encoder.back is not None),
    ("lstm", "dropout"): (SENTENCES, 0.3, lambda learner: learner.encoder.dropout.p),
    ("fast-weights", "placement"): (
        IMAGES,
        "softmax",
        lambda learner: "softmax" if learner.hidden.rule is None and learner.output.rule is not None else "fc",
    ),
    ("fast-weights", "rule"): (
        IMAGES,
        "normalised",
        lambda learner: "normalised" if isinstance(learner.hidden.rule, Normalised) else "hebb",
    ),
    ("fast-weights", "width"): (IMAGES, 17, lambda learner: len(learner.hidden.slow.weight)),
    ("fast-weights", "bias"): (IMAGES, False, lambda learner: learner.hidden.slow.bias is not None),
    ("fast-weights", "label_noise"): (IMAGES, 0.02, lambda learner: learner.label_noise),
    ("maml", "inner_steps"): (MAML, 2, lambda learner: learner.inner_steps),
    ("maml", "inner_rate"): (MAML, 0.05, lambda learner: learner.inner_rate),
    ("maml", "first_order"): (MAML, True, lambda learner: learner.first_order),
}
"""By encoder or system, and setting: other settings, a value that is not the default, and where it must be found."""


def test_of_every_setting_of_a_learner_it_is_known_where_it_goes():
    named = {(part, name) for of in (OF_ENCODER, OF_SYSTEM) for part, names in of.items() for name in names}
    assert set(REACHED) == named


@pytest.mark.parametrize(("part", "name"), REACHED)
def test_a_setting_reaches_the_learner(part, name):
    others, value, find = REACHED[part, name]
    assert value not in (getattr(LearnerSettings(), name), others.get(name))
    assert find(build_learner(LearnerSettings(**{**others, name: value}))) == value
    assert find(build_learner(LearnerSettings(**others))) != value


@pytest.mark.parametrize("system", ["fast-weights", "maml"])
def test_the_label_slots_reach_the_learner(system):
    assert build_learner(LearnerSettings(**{**IMAGES, "system": system, "slots": 7})).slots == 7
