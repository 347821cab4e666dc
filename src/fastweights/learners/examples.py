"""Learners that simply keep every example, its key and its label; the simplest of them learns nothing."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN, KeyLearner
from fastweights.learners.checks import State, check_label
from fastweights.nn.encoders import images_to_float
from fastweights.nn.init import Shapes
from fastweights.utils.precision import full_precision


class ExampleLearner(KeyLearner):
    """Keeps keys (T, n, D) and labels as one-hots (T, n, N); how to compare a query with them is up to `answer`."""

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        return {"keys": keys, "labels": F.one_hot(labels, way).to(keys.dtype)}

    @property
    def state_shapes(self) -> Shapes:
        return {"keys": (None, getattr(self.encoder, "width", None)), "labels": (None, None)}

    @full_precision
    def bind_more(self, state: State, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        more = self.bind(keys, labels, way)
        grown = F.pad(state["labels"], (0, way - self.way_of(state)))
        return {"keys": torch.cat([state["keys"], more["keys"]], 1), "labels": torch.cat([grown, more["labels"]], 1)}

    def way_of(self, state: State) -> int:
        return state["labels"].shape[2]

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        """Examples of the label are left without one, not cut out, so that tasks stay aligned."""
        self.check_state(state)
        way = self.way_of(state)
        check_label(label, way)
        others = torch.arange(way, device=state["labels"].device) != label
        return {"keys": state["keys"], "labels": state["labels"] * others}


class PixelNearestNeighbour(ExampleLearner):
    """Logits are the negative Euclidean distance to the nearest example of each class, on raw pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Pixels()

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        nearness = -torch.cdist(queries, state["keys"])
        return nearness.unsqueeze(-1).masked_fill(state["labels"].unsqueeze(1) == 0, UNSEEN).amax(2)


class _Pixels(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images_to_float(images).flatten(1)
