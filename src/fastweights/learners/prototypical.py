"""Prototypical Networks (Snell et al., 2017): a class is the mean of its keys, a query belongs to the nearest mean."""

from torch import Tensor, nn

from fastweights.learners.base import UNSEEN
from fastweights.learners.checks import State
from fastweights.learners.class_sums import ClassSumLearner
from fastweights.learners.registry import Preset, register
from fastweights.nn import memory
from fastweights.utils.precision import full_precision


@register("prototypical", {"prototypical-cnn": Preset("Prototypical Networks: the nearest class mean")})
class Prototypical(ClassSumLearner):
    """Logits are negative squared distances to the class means. A class without examples has the logit `UNSEEN`."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        return nearness(state["sums"], state["counts"], queries)


def nearest_mean(keys: Tensor, labels: Tensor, queries: Tensor, way: int) -> Tensor:
    """Classify queries (T, q, D) by the nearest mean of keys (T, n, D) with labels (T, n): logits (T, q, N).

    With the `embed` of any learner this is the baseline that asks what an encoder knows without its memory.
    """
    return nearness(*memory.sum_by_class(keys, labels, way), queries)


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
