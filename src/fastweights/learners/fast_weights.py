"""Hebbian fast weights (Munkhdalai & Trischler, 2018): the paper's own system.

An encoder of slow weights turns an item into a key; a fully connected layer with a slow and a fast path (`FastLinear`)
binds keys to random projections of their labels in one shot; a softmax layer learns to read the labels back.

Departures and readings: the label projection stays fixed, label noise is for training only, and the loss is the mean
over queries where the paper sums them (the same to Adam).
"""

import torch
from torch import Tensor, nn

from fastweights.episodes import Episode
from fastweights.layers import FastLinear, noisy_one_hots
from fastweights.learners.base import Learner, State, check_way, count_classes


class FastWeights(Learner):
    """An encoder under a fast-weight layer under a softmax layer."""

    def __init__(
        self,
        encoder: nn.Module,
        *,
        slots: int,
        width: int = 288,
        label_noise: float = 0.0,
        slow_path: bool = True,
        truncated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.encoder, self.slots, self.label_noise = encoder, slots, label_noise
        inputs = int(encoder.width)  # type: ignore[arg-type]
        self.hidden = FastLinear(inputs, width, slots, slow=slow_path, truncated=truncated, bias=bias)
        self.output = FastLinear(width, slots, slots, fast=False, activated=False, bias=bias)

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        return self.bind(self.embed(support_x), support_y, count_classes(support_y, way))

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        return self.answer(state, self.embed(query_x))

    def recall(self, state: State, query_x: Tensor) -> Tensor:
        assert self.hidden.rule is not None
        association = self.hidden.rule.read(part(state, "hidden"), self.embed(query_x))
        return self._bound(state, association)

    def forward(self, episode: Episode) -> Tensor:
        keys, queries = self.embed_both(episode)
        return self.answer(self.bind(keys, episode.support_y, episode.way), queries)

    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        """Write keys (T, n, D) with labels (T, n) into the memory."""
        check_way(way, self.slots)
        slots = self._draw_slots(len(keys), way, keys.device)
        noise = self.label_noise if self.training else 0.0
        one_hots = noisy_one_hots(slots.gather(1, labels), self.slots, noise, keys.dtype)
        trace = self.hidden.write(keys, one_hots)
        return {"slots": slots, **{f"hidden.{name}": tensor for name, tensor in trace.items()}}

    def answer(self, state: State, queries: Tensor) -> Tensor:
        """Logits (T, q, N) of keys (T, q, D) read against the memory."""
        hidden = self.hidden(queries, part(state, "hidden"))
        return self._bound(state, self.output(hidden, {}))

    @staticmethod
    def _bound(state: State, per_slot: Tensor) -> Tensor:
        """Of numbers for every label slot (T, q, C), those of the slots that the task's classes are bound to."""
        return per_slot.gather(2, state["slots"].unsqueeze(1).expand(-1, per_slot.shape[1], -1))

    def _draw_slots(self, tasks: int, way: int, device: torch.device) -> Tensor:
        """(T, N): the label slot that each class of a task is bound to; random in training, the first N after it."""
        if self.training and way < self.slots:
            return torch.rand(tasks, self.slots, device=device).topk(way).indices
        return torch.arange(way, device=device).expand(tasks, way)


def part(state: State, layer: str) -> dict[str, Tensor]:
    """The trace of one layer within a learner's state."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
