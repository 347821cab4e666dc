"""Presets: the paper's hyper-parameters, pinned sizes, and that every one of them learns."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from fastweights.learners import Learner, build_learner
from fastweights.learners.registry import (
    PRESETS,
    LearnerSettings,
    count_parameters,
    encoder_of,
    parse_overrides,
    preset,
    reads_text,
    settings_of,
)
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError

OMNIGLOT: dict[str, Any] = {"dataset": "omniglot", "item_shape": (28, 28, 1), "vocabulary": 0}
MINI_IMAGENET: dict[str, Any] = {"dataset": "mini-imagenet", "item_shape": (84, 84, 3), "vocabulary": 0}
PENN_TREEBANK: dict[str, Any] = {"dataset": "ptb", "item_shape": (64,), "vocabulary": 10_000}

IMAGE_PRESETS = [name for name in PRESETS if not reads_text(name)]
TEXT_PRESETS = [name for name in PRESETS if reads_text(name)]
NARROW: dict[str, dict[str, Any]] = {
    "cnn": {"layers": 2, "filters": 8, "width": 32},
    "resnet": {"blocks": (8, 8, 16), "features": 32, "width": 32},
    "lstm": {"embedding": 16, "units": 24, "width": 24},
    "pixels": {"size": 6},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Networks this narrow are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- sizes

PARAMETERS = {
    "fwcnn-hebb": (173_172, 122_725),
    "fwcnn-gradient": (174_933, 124_486),
    "fwcnn-gradient1": (174_933, 124_486),
    "fwcnn-normalised": (173_173, 122_726),
    "fwcnn-optimal": (173_174, 122_727),
    "fwresnet-hebb": (3_564_372, 3_550_277),
    "fwresnet-gradient": (3_566_133, 3_552_038),
    "fwresnet-gradient1": (3_566_133, 3_552_038),
    "fwresnet-normalised": (3_564_373, 3_550_278),
    "lstm-fwmlp-hebb": (3_764_405, 4_536_605),
    "lstm-fwmlp-gradient": (3_766_166, 4_538_366),
    "lstm-fwmlp-gradient1": (3_766_166, 4_538_366),
    "lstm-fwmlp-normalised": (3_764_406, 4_536_606),
    "fwcnn-open": (167_393, 121_281),
    "fwresnet-open": (3_543_873, 3_545_153),
    "lstm-fwmlp-open": (3_763_401, 4_535_101),
    "matching-cnn": (148_673, 38_049),
    "matching-lstm": (3_723_201, 4_444_801),
    "prototypical-cnn": (148_672, 38_048),
    "ridge-cnn": (185_698, 776_674),
    "metanet-cnn": (312_468, 249_492),
    "adacnn-df": (311_286, 247_727),
    "adacnn-gradient": (310_566, 247_607),
    "adaresnet-df": (7_112_566, 7_099_151),
    "adaresnet-gradient": (7_111_846, 7_099_031),
    "maml-cnn": (149_972, 39_493),
    "maml-first-order-cnn": (149_972, 39_493),
    "matching-cnn-fce": (264_897, 2_367_393),
    "matching-lstm-fce": (4_848_001, 6_972_001),
    "meta-lstm-cnn": (118_946, 36_659),
    "snail-cnn": (6_487_108, 3_357_758),
    "snail-resnet": (12_214_660, 8_294_206),
    "mann-pixels": (665_788, 1_288_373),
    "mann-cnn": (662_268, 2_284_405),
    "siamese-cnn": (1_168_449, 9_558_209),
    "hebbian-softmax-cnn": (111_680, 112_832),
    "hebbian-softmax-lstm": (3_723_200, 4_444_800),
    "adalstm-df": (4_451_127, 5_894_827),
    "adalstm-gradient": (4_451_007, 5_894_707),
    "lstm-adaffn-df": (7_531_527, 9_075_427),
}
"""Omniglot 20-way and mini-ImageNet 5-way; for sentences Penn Treebank 1-shot and 3-shot, 5-way."""


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name: str) -> None:
    if name in TEXT_PRESETS:
        both = [preset(name, **PENN_TREEBANK, way=5, shot=shot) for shot in (1, 3)]
    else:
        both = [preset(name, **OMNIGLOT, way=20, shot=1), preset(name, **MINI_IMAGENET, way=5, shot=1)]
    assert tuple(count_parameters(settings) for settings in both) == PARAMETERS[name]


def test_the_parameters_of_fwcnn_add_up_to_the_papers_layers() -> None:
    convolutions = 3 * 3 * 3 * 32 + 4 * 3 * 3 * 32 * 32
    norms, fc, softmax = 5 * 2 * 32, 288 * 288 + 288, 288 * 5 + 5
    assert PARAMETERS["fwcnn-hebb"][1] == convolutions + norms + fc + softmax


def test_the_parameters_of_fwresnet_add_up_to_the_papers_layers() -> None:
    pairs = [(3, 64), (64, 96), (96, 128), (128, 256)]
    blocks = sum(9 * (n * m + 2 * m * m) + 3 * 2 * m + n * m for n, m in pairs)
    last, fc, softmax = 256 * 1024 + 2 * 1024, 1024 * 1024 + 1024, 1024 * 5 + 5
    assert PARAMETERS["fwresnet-hebb"][1] == blocks + last + fc + softmax


def test_the_parameters_of_lstm_fwmlp_add_up_to_the_papers_layers() -> None:
    embeddings, first, second = 10_000 * 300, 4 * 200 * (300 + 200 + 2), 4 * 200 * (200 + 200 + 2)
    assert PARAMETERS["lstm-fwmlp-hebb"][0] == embeddings + first + second + (200 * 200 + 200) + (200 * 5 + 5)


def test_the_papers_hyper_parameters() -> None:
    small, large = (
        preset("fwcnn-hebb", **OMNIGLOT, way=20, shot=1),
        preset("fwcnn-hebb", **MINI_IMAGENET, way=5, shot=5),
    )
    assert (small.layers, small.filters, small.width, small.slots, small.label_noise) == (5, 64, 288, 20, 0.01)
    assert (large.layers, large.filters, large.width, large.slots, large.label_noise) == (5, 32, 288, 5, 0.01)
    resnet = preset("fwresnet-hebb", **MINI_IMAGENET, way=5, shot=1)
    assert (resnet.blocks, resnet.features, resnet.width) == ((64, 96, 128, 256), 1024, 1024)
    assert (resnet.dropout, resnet.label_noise) == (0.0, 0.0)
    for shot, units in ((1, 200), (2, 300), (3, 300)):
        lstm = preset("lstm-fwmlp-hebb", **PENN_TREEBANK, way=5, shot=shot)
        assert (lstm.layers, lstm.embedding, lstm.units, lstm.width) == (2, 300, units, units)
        assert (lstm.dropout, lstm.readout, lstm.bidirectional) == (0.0, "end", False)


def test_counting_parameters_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    count_parameters(preset("fwcnn-hebb", **OMNIGLOT, way=5, shot=1))
    assert torch.equal(torch.get_rng_state(), before)


# ---- overrides and mistakes


def test_everything_can_be_overridden() -> None:
    settings = preset("fwcnn-hebb", **OMNIGLOT, way=5, shot=1, slots=20, filters=16, placement="softmax", label_noise=0)
    assert (settings.slots, settings.filters, settings.placement, settings.label_noise) == (20, 16, "softmax", 0)
    assert build_learner(settings).placement == "softmax"


def test_overrides_as_they_are_typed() -> None:
    typed = ["features=32", "dropout=0.1", "bias=False", "blocks=8,16", "rule=optimal"]
    expected = {"features": 32, "dropout": 0.1, "bias": False, "blocks": (8, 16), "rule": "optimal"}
    assert parse_overrides("fwresnet-hebb", typed) == expected
    assert parse_overrides("fwcnn-hebb", ["blocks=8", "encoder=resnet"]) == {"blocks": (8,), "encoder": "resnet"}
    for wrong, message in {
        "features": "name=value",
        "features=many": "features wants a whole number, not 'many'",
        "features=1.5": "features wants a whole number, not '1.5'",
        "fetures=3": r"no setting of fwresnet-hebb called 'fetures' \(did you mean features\?\)",
        "filters=3": "filters has no effect on fwresnet-hebb",
        "bias=perhaps": "bias wants true or false",
        "blocks=a,b": "blocks wants whole numbers separated by commas",
        "colour=red": "no setting of fwresnet-hebb called 'colour'",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_overrides("fwresnet-hebb", [wrong])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"colour": "red"}, r"no setting of fwcnn-hebb called 'colour'; there are balance, batch_norm, bias"),
        ({"filters": "many"}, r"filters wants a whole number, not 'many'"),
        ({"filters": True}, r"filters wants a whole number, not True"),
        ({"label_noise": "much"}, r"label_noise wants a number"),
        ({"encoder": "resnet", "blocks": [1, 2]}, r"blocks wants whole numbers"),
        ({"filters": 0}, r"filters must be at least 1, not 0"),
        ({"encoder": "resnet", "dropout": 1.0}, r"dropout must be below 1, not 1.0"),
        ({"label_noise": -0.1}, r"label_noise must be at least 0, not -0.1"),
        ({"label_noise": float("nan")}, r"label_noise wants a number, not nan"),
        ({"system": "maml", "inner_rate": 0.0}, r"inner_rate must be above 0, not 0.0"),
    ],
)
def test_wrong_overrides_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preset("fwcnn-hebb", **OMNIGLOT, way=5, shot=1, **overrides)


def test_wrong_models_and_wrong_kinds_of_items_are_named() -> None:
    with pytest.raises(
        UserError, match=r"no model 'fwcnn' \(did you mean fwcnn-(hebb|open)\?\); there are fwcnn-hebb, "
    ):
        preset("fwcnn", **OMNIGLOT, way=5, shot=1)
    with pytest.raises(UserError, match=r"lstm-fwmlp-hebb is for sentences, but omniglot holds images; .*fwcnn-hebb"):
        preset("lstm-fwmlp-hebb", **OMNIGLOT, way=5, shot=1)
    with pytest.raises(UserError, match=r"fwcnn-hebb is for images, but ptb holds sentences; .*lstm-fwmlp-hebb"):
        preset("fwcnn-hebb", **PENN_TREEBANK, way=5, shot=1)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"system": "magic"}, "no system 'magic'; there are fast-weights"),
        ({"encoder": "magic"}, "no encoder 'magic'; there are cnn"),
        ({"rule": "magic"}, "no rule 'magic'; there are hebb, normalised"),
        ({"placement": "magic"}, "no placement 'magic'; there are fc,"),
        ({"encoder": "lstm", "vocabulary": 9, "readout": "magic"}, "no readout 'magic'; there are end, blank"),
        ({"encoder": "lstm"}, "reads sentences"),
        ({"vocabulary": 9, "item_shape": (5,)}, "reads images"),
        ({"system": "maml", "encoder": "lstm", "vocabulary": 9}, "maml adapts all tasks at once"),
    ],
)
def test_wrong_choices_are_named_when_a_learner_is_built(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_learner(replace(LearnerSettings(), **chosen))


# ---- learning

WAY = 3
RATES = {"snail-cnn": 2e-3, "snail-resnet": 2e-3}
"""Learning rates of models that want smaller ones than the usual."""
SLOW_STARTERS = ("mann-",)
"""Models that need more steps; their own tests give them as many."""


def narrow(name: str, **overrides: Any) -> LearnerSettings:
    is_text = name in TEXT_PRESETS
    small = {key: value for key, value in NARROW[encoder_of(name)].items() if key in settings_of(name)}
    return preset(
        name,
        dataset="words" if is_text else "patterns",
        item_shape=(8,) if is_text else (12, 12, 1),
        vocabulary=tiny.VOCABULARY if is_text else 0,
        way=WAY,
        shot=1,
        **{**small, **overrides},
    )


def tasks_for(name: str) -> Callable[[int], Episode]:
    draw = tiny.word_episode if name in TEXT_PRESETS else tiny.pattern_episode
    return lambda tasks: draw(tasks, way=WAY, shot=1, queries=2)


def loss_of(learner: Learner, episode: Episode) -> torch.Tensor:
    return F.cross_entropy(learner(episode).flatten(0, 1), episode.query_y.flatten())


def train(learner: Learner, draw: Callable[[], Episode], done: Callable[[float, int], bool], rate: float = 0.01) -> int:
    """Adam steps until done (of loss and step) or 200; how many it took."""
    optimiser = torch.optim.Adam(learner.parameters(), lr=rate)
    for step in range(1, 201):
        loss = loss_of(learner.train(), draw())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if done(loss.item(), step):
            return step
    pytest.fail("not learned within 200 steps")


@torch.no_grad()
def accuracy(learner: Learner, episode: Episode) -> float:
    return (learner.eval()(episode).argmax(-1) == episode.query_y).float().mean().item()


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", PRESETS)
def test_a_narrow_preset_fits_one_task(name: str) -> None:
    learner, episode = build_learner(narrow(name)), tasks_for(name)(1)
    train(learner, lambda: episode, lambda loss, _step: loss < 0.05)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(SLOW_STARTERS)])
def test_a_narrow_preset_learns_to_learn(name: str) -> None:
    """New classes in every task: at least 70 % of three ways (chance: 33 %) on tasks never seen, within 200 steps."""
    learner, draw = build_learner(narrow(name)), tasks_for(name)
    unseen, rate = draw(100), RATES.get(name, 0.01)
    train(learner, lambda: draw(16), lambda _loss, step: step % 20 == 0 and accuracy(learner, unseen) >= 0.7, rate)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_full_preset_fits_one_task(name: str) -> None:
    """As wide as in the paper, on items of the benchmark's size."""
    benchmark = PENN_TREEBANK if name in TEXT_PRESETS else MINI_IMAGENET
    learner = build_learner(preset(name, **benchmark, way=5, shot=1))
    if name in TEXT_PRESETS:
        episode = tiny.word_episode(1, 5, 1, 2)
    else:
        episode = tiny.noise_episode(1, 5, 1, 2, (84, 84, 3))
    rate = 1e-2 if "maml" in name else 1e-3
    train(learner, lambda: episode, lambda loss, _step: loss < 0.05, rate)


# ---- devices


@pytest.mark.parametrize("name", PRESETS)
def test_both_phases_run_without_looking_into_a_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no contents: whatever would wait for one, or take its shape from one, fails."""
    monkeypatch.setattr("fastweights.learners.checks.is_at_hand", lambda x: False)  # as on a GPU
    monkeypatch.setattr("fastweights.nn.coordinates.FEW", math.inf)  # likewise
    with FakeTensorMode():
        learner, episode = build_learner(narrow(name, slots=5)), tasks_for(name)(2)
        loss_of(learner, episode).backward()
        learner.eval()
        state = learner.describe(episode.support_x, episode.support_y, WAY)
        assert learner.predict(state, episode.query_x).shape == (2, WAY * 2, WAY)
        with pytest.raises(DataDependentOutputException):
            learner.describe(episode.support_x, episode.support_y)


EPISODE_PARTS = ("support_x", "support_y", "query_x", "query_y")


def on_cuda(episode: Episode) -> Episode:
    return Episode(*(getattr(episode, part).cuda() for part in EPISODE_PARTS), way=episode.way)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double().cpu() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_cuda_agrees_with_the_cpu(name: str, bfloat16: bool) -> None:
    """Logits and gradients of the whole; eval mode, so that nothing is random."""
    learner, episode = build_learner(narrow(name)).eval(), tasks_for(name)(8)
    for module in learner.modules():
        if isinstance(module, nn.LSTM):
            module.train()  # the vendor's LSTM has gradients in training only; here it drops nothing
    twin = deepcopy(learner).cuda()
    exact = learner(episode)
    F.cross_entropy(exact.mT, episode.query_y).backward()
    with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
        logits = twin(on_cuda(episode))
    assert logits.dtype == torch.float32
    F.cross_entropy(logits.mT, episode.query_y.cuda()).backward()
    ours, theirs = ({n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (twin, learner))
    assert ours.keys() == theirs.keys()  # MetaNet's key.output only makes gradients, which are constants
    assert len(ours) > 0
    assert relative_error(logits.detach(), exact.detach()) < (0.1 if bfloat16 else 0.01)
    ours, theirs = (torch.cat([grad.flatten() for grad in found.values()]) for found in (ours, theirs))
    assert relative_error(ours, theirs) < (0.3 if bfloat16 else 0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_is_never_waited_for(name: str) -> None:
    learner, episode = build_learner(narrow(name, slots=5)).cuda(), on_cuda(tasks_for(name)(8))
    loss_of(learner, episode).backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        loss_of(learner, episode).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("prototypical-cnn", {"placement": "softmax"}),
        ("matching-cnn", {"rule": "gradient"}),
        ("fwcnn-hebb", {"bidirectional": True}),
        ("fwcnn-hebb", {"inner_steps": 3}),
        ("fwresnet-hebb", {"filters": 8}),
        ("maml-cnn", {"width": 8}),
        ("lstm-fwmlp-hebb", {"blocks": (8,)}),
    ],
)
def test_changes_that_change_nothing_are_refused(name, without):
    with pytest.raises(UserError, match=f"{next(iter(without))} has no effect on {name}"):
        narrow(name, **without)
