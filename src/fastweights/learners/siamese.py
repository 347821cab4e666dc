"""Siamese Networks (Koch et al., 2015): a network that tells whether two images show the same class.

Both images of a pair go through one encoder and a layer of sigmoid units; the probability that they are of one class is
the sigmoid of a weighted sum of the absolute differences between these units. It is trained on pairs alone
(verification); an N-way question is answered by the example which the query is most probably of one class with.

Our readings: pairs are those of a query and a support example of a training task, and as in the original half of the
loss comes from pairs of one class, however many they are; with several shots a class is as probable as its best
example. The weights of the differences start at the same negative number, so that what is alike is one class from the
first step on. The original's encoder, for 105 x 105 pixels, has filters of 10 x 10 to 4 x 4; the numbers in the tables
are of a later re-run by the authors of Matching Networks, fine-tuned on each test task's examples. Ours has the four
layers of their encoder, on 28 x 28 pixels, and is not fine-tuned.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.learners.base import UNSEEN, joined
from fastweights.learners.checks import State
from fastweights.learners.examples import ExampleLearner
from fastweights.learners.registry import Preset, register
from fastweights.nn.init import Shapes, he_init
from fastweights.tasks.episodes import Episode
from fastweights.utils.precision import check_precise, full_precision
from fastweights.utils.settings import Settings, option

STEEPNESS = 10.0
"""How much the mean absolute difference counts against a pair at the start."""


@dataclass(frozen=True)
class SiameseSettings(Settings):
    width: int = option(4096, at_least=1, at_most=10**6)
    """Sigmoid units that are compared."""


@register("siamese", {"siamese-cnn": Preset("Siamese Networks: the most similar pair", {"layers": 4, "filters": 64})})
class Siamese(ExampleLearner):
    """The logit of a class is the largest of its pairs' logits; that of a class without examples is `UNSEEN`."""

    Settings = SiameseSettings
    allows_tf32 = True

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.width = encoder, width
        self.units = he_init(nn.Linear(int(encoder.width), width), 1.0)  # type: ignore[arg-type]
        self.weights = nn.Parameter(torch.full((width,), -STEEPNESS / width))
        self.bias = nn.Parameter(torch.tensor(1.0))

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        check_precise(self.units.weight)
        return super().bind(self.units(keys).sigmoid(), labels, way)

    @property
    def state_shapes(self) -> Shapes:
        return {"keys": (None, self.width), "labels": (None, None)}

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        return best_pairs(self.compare(state, queries), state["labels"])

    def compare(self, state: State, queries: Tensor) -> Tensor:
        """The logits (T, q, n) that queries (T, q, D) are of one class with each example of a state."""
        return weighted_differences(self.units(queries), state["keys"], self.weights) + self.bias

    def training_loss(self, episode: Episode, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        all_keys = self.embed(joined(episode.support_x, episode.query_x))
        keys, queries = all_keys.split((episode.support_x.shape[1], episode.query_x.shape[1]), dim=1)
        return self._verify(keys, queries, episode, label_smoothing)

    @full_precision
    def _verify(self, keys: Tensor, queries: Tensor, episode: Episode, smoothing: float) -> tuple[Tensor, Tensor]:
        state = self.bind(keys, episode.support_y, episode.way)
        pairs = self.compare(state, queries)
        same = episode.query_y.unsqueeze(-1) == episode.support_y.unsqueeze(1)
        return verification_loss(pairs, same, smoothing), best_pairs(pairs, state["labels"])


def weighted_differences(x: Tensor, examples: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of absolute differences of the sigmoids of x (T, q, D) and examples (T, n, D): (T, q, n).

    As two distances, one weighted by the positive and one by the negative weights: unlike the differences of all pairs
    these take no memory.
    """
    if _can_be_fused(x, examples, weights):
        from fastweights.kernels.weighted_l1 import weighted_l1  # deferred: needs a GPU and Triton

        return weighted_l1(x, examples, weights)
    queries, parts = x.sigmoid(), (weights.clamp(min=0), weights.clamp(max=0))
    for_it, against = (torch.cdist(queries * part, examples * part, p=1.0) for part in parts)
    return for_it - against


def _can_be_fused(*inputs: Tensor) -> bool:
    return has_triton() and all(x.is_cuda and x.dtype == torch.float32 for x in inputs)


def best_pairs(pairs: Tensor, labels: Tensor) -> Tensor:
    """The largest logit of each class: of pairs (T, q, n) with examples of labels (T, n, N), (T, q, N)."""
    return pairs.unsqueeze(-1).masked_fill(labels.unsqueeze(1) == 0, UNSEEN).amax(2)


def verification_loss(pairs: Tensor, same: Tensor, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of logits by whether they are of one class, half of it from pairs that are."""
    wrong = (1 - 2 * same) * pairs  # the logit of what is not so
    losses = F.softplus(wrong)
    if smoothing:
        losses = losses - smoothing / 2 * wrong
    count = same.sum()
    return (losses / torch.where(same, count, same.numel() - count)).sum() / 2
