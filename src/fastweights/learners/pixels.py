"""Nearest neighbour on raw pixels: what one gets without learning anything."""

import torch
from torch import Tensor

from fastweights.learners.base import Learner, State, count_classes


class PixelNearestNeighbour(Learner):
    """Answers with the label of the support image that is nearest in Euclidean distance."""

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        classes = torch.arange(count_classes(support_y, way), device=support_y.device)
        return {"images": support_x, "is_class": support_y.unsqueeze(-1) == classes}

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        distance = torch.cdist(query_x.flatten(2).float(), state["images"].flatten(2).float())
        of_class = distance.unsqueeze(-1).masked_fill(~state["is_class"].unsqueeze(1), torch.inf)
        return -of_class.amin(2)
