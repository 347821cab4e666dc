"""Prototypical Networks (Snell et al., 2017): a class is the mean of its keys, a query belongs to the nearest mean."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN, KeyLearner
from fastweights.learners.checks import State, check_label
from fastweights.learners.registry import Preset, register
from fastweights.nn import memory
from fastweights.nn.init import Shapes
from fastweights.utils.precision import full_precision


@register("prototypical", {"prototypical-cnn": Preset("Prototypical Networks: the nearest class mean")})
class Prototypical(KeyLearner):
    """Logits are negative squared distances to the class means; the state is class sums (T, N, D) and counts (T, N).

    A class without examples, as after `forget`, has the logit `UNSEEN`.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        return class_sums(keys, labels, way)

    @property
    def state_shapes(self) -> Shapes:
        return {"sums": (None, getattr(self.encoder, "width", None)), "counts": (None,)}

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        return nearness(state["sums"], state["counts"], queries)

    @full_precision
    def bind_more(self, state: State, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        grown = way - self.way_of(state)
        more = class_sums(keys, labels, way)
        return {
            "sums": memory.add(F.pad(state["sums"], (0, 0, 0, grown)), more["sums"]),
            "counts": F.pad(state["counts"], (0, grown)) + more["counts"],
        }

    def way_of(self, state: State) -> int:
        return state["counts"].shape[1]

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        self.check_state(state)
        way = self.way_of(state)
        check_label(label, way)
        others = torch.arange(way, device=state["counts"].device) != label
        return {"sums": state["sums"] * others.unsqueeze(-1), "counts": state["counts"] * others}


def nearest_mean(keys: Tensor, labels: Tensor, queries: Tensor, way: int) -> Tensor:
    """Classify queries (T, q, D) by the nearest mean of keys (T, n, D) with labels (T, n): logits (T, q, N).

    With the `embed` of any learner this is the baseline that asks what an encoder knows without its memory.
    """
    state = class_sums(keys, labels, way)
    return nearness(state["sums"], state["counts"], queries)


def class_sums(keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
    one_hots = F.one_hot(labels, way).to(keys.dtype)
    return {"sums": memory.write_sums(keys, one_hots), "counts": one_hots.sum(1)}


def nearness(sums: Tensor, counts: Tensor, queries: Tensor) -> Tensor:
    """Negative squared distances of queries (T, q, D) to the means of classes: (T, q, N).

    All are first moved by the mean of the examples: of long keys that share a part, the squares' difference would be
    rounding.
    """
    middle = sums.sum(1, keepdim=True) / counts.sum(1).clamp(min=1).view(-1, 1, 1)
    means, queries = sums / counts.clamp(min=1).unsqueeze(-1) - middle, queries - middle
    products = queries @ means.mT
    squares = queries.square().sum(-1, keepdim=True) + means.square().sum(-1).unsqueeze(1)
    return (2 * products - squares).masked_fill((counts == 0).unsqueeze(1), UNSEEN)
