"""Learners that keep of each class the sum of its keys and their number: no label slots, any number of classes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.learners.base import KeyLearner
from fastweights.learners.checks import State, check_label, check_labels, count_classes
from fastweights.nn import memory
from fastweights.nn.init import Shapes
from fastweights.utils.errors import UserError
from fastweights.utils.precision import full_precision


class ClassSumLearner(KeyLearner):
    """The state is class sums (T, N, D) and counts (T, N); how to compare a query with them is up to `answer`.

    Forgetting a class frees its place: examples that are added under its label later are a new class. A single example
    can be forgotten as well.
    """

    def to_memory(self, keys: Tensor) -> Tensor:
        """What of keys (T, n, D) is summed, and compared with the sums."""
        return keys

    def memory_keys(self, x: Tensor) -> Tensor:
        return self.to_memory(super().memory_keys(x))

    @property
    def memory_width(self) -> int | None:
        """The width of what is summed."""
        return getattr(self.encoder, "width", None)

    @property
    def state_shapes(self) -> Shapes:
        return {"sums": (None, self.memory_width), "counts": (None,)}

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        sums, counts = memory.sum_by_class(self.to_memory(keys), labels, way)
        return {"sums": sums, "counts": counts}

    @full_precision
    def bind_more(self, state: State, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        grown, more = way - self.way_of(state), self.bind(keys, labels, way)
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

    def forget_examples(self, state: State, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The state without these examples (T, m, *item) of these labels (T, m), which must be among those described.

        Exact up to rounding; the sum of a class that has none left is exactly zero.
        """
        self.check_items(x)
        check_labels(x, y)
        self.check_state(state, x)
        way = self.way_of(state)
        if count_classes(y, None, way) > way:
            raise UserError(f"there is no label {int(y.max())} to forget examples of: labels go from 0 to {way - 1}.")
        less = self.bind(self.embed(x), y, way)
        counts = state["counts"] - less["counts"]
        if (counts < 0).any():
            raise UserError(
                "more examples of a class were to be forgotten than it has; forget only what was described."
            )
        return {"sums": (state["sums"] - less["sums"]) * (counts > 0).unsqueeze(-1), "counts": counts}
