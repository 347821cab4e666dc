"""Fast weights in the output layer alone, without label slots: any number of classes, known in advance or not.

This is one of the paper's ablations (placement `softmax-fast-only` of `fast_weights`, its green bar) written so that no
number of classes is fixed: a fully connected layer of slow weights above the encoder, and one memory whose rows are the
classes. It treats all labels alike, so that a sixth class, or a ten-thousandth, is one more row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN, ScaledKeys
from fastweights.learners.checks import State
from fastweights.learners.class_sums import ClassSumLearner
from fastweights.learners.registry import Preset, register
from fastweights.nn import memory
from fastweights.nn.init import SLOPE, he_init
from fastweights.utils.errors import UserError
from fastweights.utils.precision import full_precision
from fastweights.utils.settings import Settings, option

LAYERS = ("fresh", "identity", "none")


@dataclass(frozen=True)
class OpenMemorySettings(Settings):
    width: int = option(288, at_least=1, at_most=10**6)
    """Units of the fully connected layer below the memory."""
    layer: str = option("fresh", choices=LAYERS)
    """How this layer starts: with fresh weights, passing keys on unchanged (as wide as the encoder), or not at all."""
    scale: float = option(10.0, above=0)
    """What similarities are multiplied by at the start of training."""


@register(
    "open-memory",
    {
        "fwcnn-open": Preset("fwCNN with fast weights in the output layer alone: any number of classes (ours)"),
        "fwresnet-open": Preset("fwResNet likewise: any number of classes (ours)", {"width": 1024}, "resnet"),
        "lstm-fwmlp-open": Preset("LSTM + fwMLP likewise: any number of classes (ours)", encoder="lstm"),
    },
)
class OpenMemory(ScaledKeys, ClassSumLearner):
    """Logits are cosines of a query's key with the sums of the classes' keys, times a learned scale.

    Keys are made unit length before they are summed, so that no example speaks louder than another; with one shot this
    is the rule `normalised`. A class without examples, as after `forget`, has the logit `UNSEEN`. Unequal numbers of
    examples need no balancing.
    """

    Settings = OpenMemorySettings

    def __init__(self, encoder: nn.Module, **options: Any) -> None:
        super().__init__()
        s = OpenMemorySettings(**options)
        self.encoder = encoder
        self.hidden = _layer(int(encoder.width), s)  # type: ignore[arg-type]
        self.log_scale = nn.Parameter(torch.tensor(math.log(s.scale)))

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """The paper's sizes for sentences: a layer as wide as the LSTM."""
        return {"width": 200 if shot == 1 else 300} if vocabulary else {}

    @full_precision
    def to_memory(self, keys: Tensor) -> Tensor:
        return F.normalize(keys if self.hidden is None else F.leaky_relu(self.hidden(keys), SLOPE), dim=-1)

    @property
    def memory_width(self) -> int | None:
        return super().memory_width if self.hidden is None else self.hidden.out_features

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        similarity = cosines(state["sums"], self.to_memory(queries))
        return (self.log_scale.exp() * similarity).masked_fill((state["counts"] == 0).unsqueeze(1), UNSEEN)

    def recall(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        return cosines(state["sums"], self.memory_keys(query_x))


def _layer(inputs: int, s: OpenMemorySettings) -> nn.Linear | None:
    """The layer between encoder and memory, if there is to be one."""
    if s.layer == "none":
        return None
    layer = he_init(nn.Linear(inputs, s.width), SLOPE)
    if s.layer == "identity":
        if s.width != inputs:
            raise UserError(f"a layer that passes keys on unchanged is as wide as the encoder: set width to {inputs}.")
        nn.init.eye_(layer.weight)
    return layer


def cosines(sums: Tensor, queries: Tensor) -> Tensor:
    """The cosines (T, q, N) of queries (T, q, D) of unit length with class sums (T, N, D)."""
    return memory.read_sums(F.normalize(sums, dim=-1), queries)
