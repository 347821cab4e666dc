"""Stacks of LSTMs in waves against one layer after the other, values and gradients: on a GPU, or interpreted."""

from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels.lstm import run_stacks
from fastweights.learners import adaptive_text, build_learner, matching
from fastweights.learners.matching import ContextMatching
from fastweights.learners.registry import preset
from fastweights.nn import recurrence
from fastweights.nn.encoders import CNN
from fastweights.nn.recurrence import lstm_layer
from fastweights.tasks.episodes import Episode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 5e-5 if DEVICE == "cuda" else 1e-5
"""Relative error allowed; a GPU has faster exponentials."""


def plain(
    inputs: Tensor, weights: Tensor, biases: Tensor, mask: Tensor | None, shifts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Stack by stack and layer by layer."""
    layers, found = (len(weights) + 1) // 2, []
    for layer in range(layers):
        each = []
        for stack in range(len(inputs)):
            x = inputs[stack]
            if layer:
                below = found[-1][0][stack]
                below = below if mask is None else below * mask[layer - 1, stack]
                x = below @ weights[layers - 1 + layer, stack].mT + biases[layer - 1, stack]
            each.append(lstm_layer(x, weights[layer, stack], None if shifts is None else shifts[layer, stack]))
        found.append([torch.stack(one) for one in zip(*each, strict=True)])
    outputs, cells = zip(*found, strict=True)
    return torch.stack(outputs), torch.stack(cells)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


def draw(layers: int, stacks: int, masked: bool, shifted: bool, words: int = 3) -> list[Tensor | None]:
    sentences, units, generator = 2, 5, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (0.7 * torch.randn(*shape, generator=generator)).to(DEVICE)

    of_layer = (stacks, sentences, units)
    tensors = [
        normal(stacks, words, sentences, 4 * units),
        normal(2 * layers - 1, stacks, 4 * units, units),
        normal(layers - 1, stacks, 4 * units),
        normal(layers - 1, stacks, words, sentences, units) if masked else None,
        normal(layers, *of_layer) if shifted else None,
    ]
    return [one if one is None or i == 3 else one.requires_grad_() for i, one in enumerate(tensors)]


@pytest.mark.parametrize(
    ("layers", "stacks", "masked", "shifted", "used"),
    [
        (1, 1, False, False, "outputs"),
        (1, 2, False, True, "both"),
        (2, 1, True, True, "outputs"),
        (2, 2, False, False, "cells"),
        (3, 2, True, True, "both"),
    ],
)
def test_waves_equal_one_layer_after_the_other(
    layers: int, stacks: int, masked: bool, shifted: bool, used: str
) -> None:
    tensors = draw(layers, stacks, masked, shifted)
    wide = [None if one is None else one.detach().double().requires_grad_(one.requires_grad) for one in tensors]
    results = []
    for run, given in ((run_stacks, tensors), (plain, wide)):
        outputs, cells = run(*given)  # type: ignore[operator]
        weights = torch.linspace(-1, 1, outputs.numel()).to(outputs).view_as(outputs)
        loss = sum(
            (one * factor * weights).sum()
            for name, one, factor in (("outputs", outputs, 1), ("cells", cells, 0.5))
            if used in (name, "both")
        )
        wanted = [one for one in given if one is not None and one.requires_grad and one.numel()]
        results.append([outputs, cells, *torch.autograd.grad(loss, wanted, materialize_grads=True)])
    for ours, theirs in zip(*results, strict=True):
        assert error(ours, theirs) < TOLERANCE if theirs.any() else not ours.any()


def test_one_word_is_enough() -> None:
    tensors = draw(2, 1, False, False, words=1)
    for ours, theirs in zip(run_stacks(*tensors), plain(*tensors), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(ours, theirs)


def test_without_gradients_nothing_changes() -> None:
    tensors = draw(2, 2, False, True, words=2)
    kept = run_stacks(*tensors)  # type: ignore[arg-type]
    with torch.no_grad():
        assert all(map(torch.equal, run_stacks(*tensors), kept))  # type: ignore[arg-type]


# ---- learners that are computed in waves


def on_device(episode: Episode) -> Episode:
    support_y, query_y = episode.support_y.to(DEVICE), episode.query_y.to(DEVICE)
    return replace(episode.map_x(lambda x: x.to(DEVICE)), support_y=support_y, query_y=query_y)


@pytest.fixture
def waves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers in float32 take the waves, others the plain path; how many stacks ran at the same time each time."""
    torch.manual_seed(0)
    ran: list[int] = []

    def counted(inputs: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        ran.append(len(inputs))
        return run_stacks(inputs, *others)

    monkeypatch.setattr("fastweights.kernels.lstm.run_stacks", counted)
    for module in (recurrence, adaptive_text, matching):
        monkeypatch.setattr(module, "runs_in_waves", lambda x: x.dtype == torch.float32)
    return ran


def compare_with_float64(learner: torch.nn.Module, episode: Episode) -> None:
    learner, episode = learner.to(DEVICE), on_device(episode)
    weights = [p for p in learner.parameters() if p.requires_grad]
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        logits = learner(episode)
        direction = torch.linspace(-1, 2, logits.numel()).to(logits).view_as(logits)
        results.append([logits, *torch.autograd.grad((logits * direction).sum(), weights, materialize_grads=True)])
        weights = [p for p in learner.double().parameters() if p.requires_grad]
    for ours, theirs in zip(*results, strict=True):
        assert error(ours, theirs) < 10 * TOLERANCE if theirs.any() else not ours.any()


@pytest.mark.parametrize(
    ("name", "changes", "ran"),
    [
        ("adalstm-df", {}, [2, 1]),
        ("adalstm-gradient", {"first_order": False}, [2, 1]),
        ("adalstm-gradient", {"dropout": 0.3}, [1, 1, 1]),
    ],
)
def test_adalstm(name: str, changes: dict[str, float], ran: list[int], waves: list[int]) -> None:
    """Both networks at the same time, unless something is dropped."""
    shape = {"dataset": "words", "item_shape": (3,), "vocabulary": tiny.VOCABULARY, "way": 2, "shot": 1}
    small = {"embedding": 5, "units": 4, "map_units": 6}
    learner = build_learner(preset(name, **shape, **small, **changes)).train()
    if changes.get("dropout"):  # other random numbers in float64: only that it runs
        learner.to(DEVICE).training_loss(on_device(tiny.word_episode(1, 2, 1, 1, 3)))[0].backward()
    else:
        compare_with_float64(learner, tiny.word_episode(1, 2, 1, 1, 3))
    assert waves == ran


def test_full_context_embeddings(waves: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    learner, episode = (
        ContextMatching(CNN((12, 12, 1), filters=2, layers=3), reads=2).eval(),
        tiny.noise_episode(tasks=1, way=3),
    )
    compare_with_float64(learner, episode)
    monkeypatch.setattr(matching, "MOST_AT_ONCE", 1)
    compare_with_float64(learner.float(), episode)
    assert waves == [2, 1, 1]
