"""The simplest baseline: the label of the described image that differs least in its pixels. Nothing is learned."""

import torch
from torch import Tensor, nn

from fastweights.learners.base import UNSEEN
from fastweights.learners.checks import State
from fastweights.learners.examples import ExampleLearner
from fastweights.nn.encoders import images_to_float
from fastweights.utils.precision import full_precision


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
