"""Every setting and every seed reaches the part it is meant for, and no other."""

from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace

import pytest
import torch

from fastweights import evaluation
from fastweights.data.items import Items
from fastweights.evaluation import evaluate
from fastweights.learners import build_learner
from fastweights.learners.registry import SYSTEMS, LearnerSettings
from fastweights.nn.encoders import ENCODERS
from fastweights.nn.rules import Normalised
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.training import loop, objectives
from fastweights.training.loop import Training
from fastweights.training.pretraining import Pretraining
from fastweights.training.step import EMA, Rate, TrainStep


@pytest.fixture
def pretrained(train_settings):
    return replace(train_settings, steps=1, pretrain_steps=1, pretrain_batch=16)


def pretraining_of(training: Training) -> Pretraining:
    return Pretraining(training.learner, training.head, training.items["train"], training.settings, graph=False)


def positions_in(questions: EvaluationTasks) -> torch.Tensor:
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


def drawn_in(drawn, work, *arguments) -> list[int]:
    """The positions that are fetched while something is done."""
    drawn.clear()
    work(*arguments)
    return torch.cat(drawn).tolist()


@pytest.mark.parametrize("split", ["val", "test"])
def test_every_seed_answers_the_same_tasks(dataset, learner_settings, train_settings, split):
    first, second = (Training(learner_settings, replace(train_settings, seed=s), dataset) for s in (0, 1))
    assert torch.equal(positions_in(first.evaluation_tasks[split]), positions_in(second.evaluation_tasks[split]))


IMAGES = {"item_shape": (8, 8, 1), "filters": 8, "layers": 3, "batch_norm": 3}
RESNET = {"encoder": "resnet", "item_shape": (8, 8, 1), "blocks": (4, 6), "features": 8}
SENTENCES = {"encoder": "lstm", "item_shape": (7,), "vocabulary": 20, "embedding": 4, "units": 6, "layers": 2}
MAML = {**IMAGES, "system": "maml"}
OPEN = {**IMAGES, "system": "open-memory"}


def by_name(name):
    return lambda learner: getattr(learner, name)


def information(learner):
    return "df" if learner.by_feedback else "gradient"


def reach(learner):
    """The shots that the temporal convolutions of a SNAIL of four classes reach over."""
    dilations = [layer.dilation for layer in learner.layers if hasattr(layer, "dilation")]
    return (2 * max(dilations) - 1) // 4


def fast_start(learner):
    """Of the two that are compared: all last weights of a MetaNet's LSTMs are smaller by the smaller one."""
    return 0.001 if learner.task_maps["dense"].readout.weight.abs().max() < 0.005 else 0.1


ADAPTIVE = {
    "map_units": (7, lambda learner: learner.output_map.mlp[0].out_features),
    "similarity": ("cosine", None),
    "first_order": (False, None),
}
ABOVE = {"width": (17, lambda learner: learner.hidden.out_features), "information": ("gradient", information)}
SHIFTED = {
    "shifted": (1, lambda learner: len(learner.shifted_layers)),
    "key_batch_norm": (True, lambda learner: isinstance(learner.key_norm, torch.nn.BatchNorm1d)),
}
REACHED = {
    ("cnn", "layers"): (IMAGES, 4, lambda learner: len(learner.encoder.convolutions)),
    ("cnn", "filters"): (IMAGES, 9, lambda learner: learner.encoder.convolutions[1].out_channels),
    ("cnn", "batch_norm"): (IMAGES, 2, lambda learner: len(learner.encoder.norms)),
    ("resnet", "blocks"): (
        RESNET,
        (5, 7, 9),
        lambda learner: tuple(len(block.shortcut.weight) for block in learner.encoder.blocks),
    ),
    ("resnet", "features"): (RESNET, 11, lambda learner: learner.encoder.mix.out_channels),
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
    ("fast-weights", "balance"): (IMAGES, False, lambda learner: learner.balance),
    ("open-memory", "width"): (OPEN, 17, lambda learner: learner.memory_width),
    ("open-memory", "layer"): (OPEN, "none", lambda learner: "fresh" if learner.hidden is not None else "none"),
    ("open-memory", "scale"): (OPEN, 20.0, lambda learner: learner.log_scale.exp().item()),
    ("cnn", "slope"): (IMAGES, 0.0, lambda learner: learner.encoder.slope),
    ("cnn", "dropout"): (IMAGES, 0.3, lambda learner: learner.encoder.dropout),
    ("cnn", "pooling"): (IMAGES, "down", lambda learner: "up" if learner.encoder.rounds_up else "down"),
    ("cnn", "uniform_start"): (IMAGES, True, lambda learner: bool((learner.encoder.norms[0].weight != 1).all())),
    ("pixels", "size"): ({"encoder": "pixels", "item_shape": (8, 8, 1)}, 4, lambda learner: learner.encoder.size),
    **{
        (system, name): ({**others, "system": system}, value, find)
        for system, others, settings in (
            (
                "hebbian-softmax",
                IMAGES,
                {
                    "presentations": (3, None),
                    "rate": (0.2, None),
                    "least_mixing": (0.3, None),
                    "mixing_limit": (4, None),
                },
            ),
            ("siamese", IMAGES, {"width": (17, None)}),
            ("matching-fce", IMAGES, {"reads": (2, None)}),
            ("maml", IMAGES, {"test_steps": (2, None)}),
            ("meta-lstm", IMAGES, {"inner_steps": (3, None), "hidden": (6, lambda learner: learner.optimiser.hidden)}),
            ("metanet", IMAGES, {"parts": (3, None), "width": (17, lambda learner: len(learner.base.hidden.weight))}),
            ("metanet", IMAGES, {"fast_start": (0.001, fast_start)}),
            (
                "mann",
                IMAGES,
                {
                    **dict.fromkeys(("places", "place_width", "heads"), (6, None)),
                    "usage_decay": (0.5, None),
                    "controller_units": (9, by_name("units")),
                    **dict.fromkeys(("sharpened", "late_labels"), (False, None)),
                },
            ),
            (
                "snail",
                {**IMAGES, "slots": 4},
                {
                    "width": (17, lambda learner: learner.embedding.out_features),
                    "temporal_filters": (9, lambda learner: learner.layers[1].outputs - learner.layers[0].outputs),
                    "shots": (3, reach),
                },
            ),
            ("adaptive", IMAGES, {**ADAPTIVE, **ABOVE, **SHIFTED}),
            ("lstm-adaffn", SENTENCES, {**ADAPTIVE, **ABOVE}),
            ("adalstm", SENTENCES, {**ADAPTIVE, "information": ("df", information)}),
        )
        for name, (value, find) in {n: (v, f or by_name(n)) for n, (v, f) in settings.items()}.items()
    },
    ("maml", "inner_steps"): (MAML, 2, lambda learner: learner.inner_steps),
    ("maml", "inner_rate"): (MAML, 0.05, lambda learner: learner.inner_rate),
    ("maml", "first_order"): (MAML, True, lambda learner: learner.first_order),
}
"""By encoder or system, and setting: other settings, a value that is not the default, and where it must be found."""


def test_of_every_setting_of_a_learner_it_is_known_where_it_goes():
    parts = {**ENCODERS, **SYSTEMS}
    named = {(part, one.name) for part, cls in parts.items() for one in fields(cls.Settings)}
    assert set(REACHED) == named


@pytest.mark.parametrize(("part", "name"), REACHED)
def test_a_setting_reaches_the_learner(part, name):
    others, value, find = REACHED[part, name]
    assert value not in (getattr(LearnerSettings(**others), name), others.get(name))
    assert find(build_learner(LearnerSettings(**{**others, name: value}))) == value
    assert find(build_learner(LearnerSettings(**others))) != value


@pytest.mark.parametrize("system", ["fast-weights", "maml"])
def test_the_label_slots_reach_the_learner(system):
    assert build_learner(LearnerSettings(**{**IMAGES, "system": system, "slots": 7})).slots == 7


def test_training_images_are_changed_as_is_asked_in_tasks_and_in_pretraining(
    dataset, learner_settings, pretrained, monkeypatch
):
    told = []
    monkeypatch.setattr(objectives, "augment", lambda images, names, turns: told.append(names) or images)
    monkeypatch.setattr(objectives, "augment_tasks", lambda task, *names: told.append(names) or task)
    settings = replace(pretrained, augment=("flip", "crop"), class_augment=("turn",))
    Training(learner_settings, settings, dataset).run()
    assert told == [("flip", "crop"), (("flip", "crop"), ("turn",))]  # pre-training's step, then the other; no test


DISTINCT = {
    "learning_rate": 0.01,
    "weight_decay": 0.02,
    "schedule": "constant",
    "encoder_lr_scale": 0.5,
    "pretrain_learning_rate": 0.03,
    "pretrain_weight_decay": 0.04,
}


def of_optimizer(take_step: TrainStep, decays: bool) -> set[tuple[float, float]]:
    """The step size and weight decay of the matrices, or of all other parameters."""
    groups = take_step.optimizer.param_groups
    return {(g["lr"], g["weight_decay"]) for g in groups if all((p.dim() > 1) == decays for p in g["params"])}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("adam", "sgd"), (torch.optim.AdamW, torch.optim.SGD)), (("sgd", "adam"), (torch.optim.SGD, torch.optim.AdamW))],
)
def test_training_and_pretraining_each_have_their_own_optimizer(dataset, learner_settings, pretrained, kinds, expected):
    settings = replace(pretrained, optimizer=kinds[0], pretrain_optimizer=kinds[1], **DISTINCT)
    training = Training(learner_settings, settings, dataset)
    before = pretraining_of(training).take_step
    assert (type(training.take_step.optimizer), type(before.optimizer)) == expected
    assert of_optimizer(training.take_step, decays=True) == {(0.005, 0.02), (0.01, 0.02)}  # the encoder's, the rest's
    assert of_optimizer(training.take_step, decays=False) == {(0.005, 0.0), (0.01, 0.0)}
    assert of_optimizer(before, decays=True) == {(0.03, 0.04)}
    assert of_optimizer(before, decays=False) == {(0.03, 0.0)}
    assert training.take_step.rate == Rate(0.01, "constant")
    assert before.rate == Rate(0.03, "cosine")


def test_the_schedule_is_that_of_training(dataset, learner_settings, train_settings):
    for schedule in ("constant", "cosine"):
        training = Training(learner_settings, replace(train_settings, schedule=schedule), dataset)
        assert training.take_step.rate.schedule == schedule


def tasks_of(training: Training) -> None:
    training.take_step(0, 0.0)


def batch_of(training: Training) -> None:
    pretraining_of(training).take_step(0, 0.0)


def tasks_to_scale_keys_by(training: Training) -> None:
    training._scale_keys()


@pytest.mark.parametrize("work", [tasks_of, batch_of, tasks_to_scale_keys_by])
def test_the_same_is_drawn_for_the_same_seed_and_something_else_for_another(
    dataset, learner_settings, pretrained, drawn, work
):
    settings = [replace(pretrained, key_norm=1.0, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (drawn_in(drawn, work, Training(learner_settings, s, dataset)) for s in settings)
    assert first == again
    assert first != other


def test_every_step_draws_anew(dataset, learner_settings, pretrained, drawn):
    training = Training(learner_settings, pretrained, dataset)
    for take_step in (training.take_step, pretraining_of(training).take_step):
        assert drawn_in(drawn, take_step, 0, 0.0) != drawn_in(drawn, take_step, 1, 0.0)


def encoder_of(training: Training) -> torch.Tensor:
    return training.learner.encoder.convolutions[0].weight


def head_of(training: Training) -> torch.Tensor:
    return training.head.weight


def turn_head_of(training: Training) -> torch.Tensor:
    return pretraining_of(training).modules["turns"].weight


@pytest.mark.parametrize("weights_of", [encoder_of, head_of, turn_head_of])
def test_first_weights_depend_on_the_seed_and_not_on_what_is_above_the_encoder(
    dataset, learner_settings, pretrained, weights_of
):
    settings = replace(pretrained, pretrain_rotation=True)
    wider = replace(learner_settings, width=65)
    weights = weights_of(Training(learner_settings, settings, dataset))
    assert torch.equal(weights, weights_of(Training(learner_settings, settings, dataset)))
    assert torch.equal(weights, weights_of(Training(wider, settings, dataset)))
    assert not torch.equal(weights, weights_of(Training(learner_settings, replace(settings, seed=1), dataset)))


def test_a_step_is_told_the_share_of_the_run_before_it(dataset, learner_settings, train_settings, monkeypatch):
    take, told = TrainStep.__call__, []

    def recorded(self, step, done):
        told.append((step, done))
        take(self, step, done)

    monkeypatch.setattr(TrainStep, "__call__", recorded)
    settings = replace(train_settings, steps=4, pretrain_steps=4, pretrain_batch=16)
    Training(learner_settings, settings, dataset).run()
    assert told == 2 * [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]  # pre-training's, then the others


def test_the_average_counts_the_weights_after_the_step():
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    average = EMA(layer, decay=0.5)

    def objective():
        return layer(torch.ones(1, 3)).square().sum(), torch.tensor(0.0)

    parts = [(1.0, layer.parameters())]
    TrainStep(objective, parts, Rate(0.1), seed="", device=torch.device("cpu"), ema=average)(0, 0.0)
    after = layer.weight.detach()
    assert not torch.equal(before, after)
    torch.testing.assert_close(average.weights()["weight"], (before + after) / 2)


def test_a_step_is_taken_in_its_context_forwards_and_backwards():
    layer, within, seen = torch.nn.Linear(3, 2), [], []

    @contextmanager
    def context():
        within.append(True)
        yield
        within.pop()

    def objective():
        seen.append(("forwards", bool(within)))
        out = layer(torch.ones(1, 3))
        out.register_hook(lambda _: seen.append(("backwards", bool(within))))
        return out.square().sum(), torch.tensor(0.0)

    parts = [(1.0, layer.parameters())]
    TrainStep(objective, parts, Rate(0.1), seed="", device=torch.device("cpu"), context=context)(0, 0.0)
    assert seen == [("forwards", True), ("backwards", True)]
    assert not within


def test_training_and_validation_ask_what_the_learner_allows(
    dataset, learner_settings, train_settings, monkeypatch
) -> None:
    asked = {"step": [], "evaluation": []}

    def asks(where):
        def recorded(*question):
            asked[where].append(question)
            return nullcontext()

        return recorded

    monkeypatch.setattr(loop, "products", asks("step"))
    monkeypatch.setattr(evaluation, "products", asks("evaluation"))
    learner = build_learner(learner_settings)
    monkeypatch.setattr(type(learner), "allows_tf32", True)
    Training(learner, replace(train_settings, steps=2), dataset).run()
    expected = (True, "float32", torch.device("cpu"))
    assert set(asked["step"]) == set(asked["evaluation"]) == {expected}
    assert len(asked["step"]) == 2


def heard(learner) -> set[bool]:
    """Whether the encoder, whenever it was called, computed in a lower precision: to be looked at later."""
    said = set()
    learner.encoder.register_forward_hook(lambda *_: said.add(torch.is_autocast_enabled("cpu")))
    return said


@pytest.mark.parametrize(("precision", "lower"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("system", ["fast-weights", "maml"])
def test_evaluation_computes_in_the_precision_it_is_given(dataset, learner_settings, system, precision, lower):
    learner = build_learner(replace(learner_settings, system=system))
    said = heard(learner)
    questions = EvaluationTasks(dataset, "test", way=5, shot=1, queries=2, tasks=2)
    evaluate(learner, dataset.splits["test"], questions, precision)
    assert said == {lower}


def validate(training: Training) -> None:
    training._validate()


@pytest.mark.parametrize(("precision", "lower"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("work", [tasks_of, batch_of, tasks_to_scale_keys_by, validate])
def test_all_of_a_training_computes_in_its_precision(dataset, learner_settings, pretrained, work, precision, lower):
    training = Training(learner_settings, replace(pretrained, precision=precision, key_norm=1.0), dataset)
    said = heard(training.learner)
    work(training)
    assert said == {lower}
