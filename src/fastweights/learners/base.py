"""What every system, ours and its rivals, looks like from outside: two phases and a state between them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fastweights.episodes import Episode
from fastweights.errors import UserError

State = Mapping[str, Tensor]
"""What a learner keeps of the tasks it was told: a flat dict of tensors, each with a leading task dimension."""


class Learner(nn.Module):
    """A system that is described a task once and then answers questions about it.

    Labels of a task of N classes are 0 .. N-1. `way` is N; it may be left out, and is then read off the labels, which
    on a GPU waits for them. In eval mode the answer to a query depends on the description and on that query alone.
    """

    encoder: nn.Module

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        """Description phase: items (T, n, *item) with labels (T, n) become a state."""
        raise NotImplementedError

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        """Prediction phase: items (T, q, *item) become logits (T, q, N)."""
        raise NotImplementedError

    def recall(self, state: State, query_x: Tensor) -> Tensor | None:
        """How strongly the memory associates items (T, q, *item) with each class: (T, q, N).

        For looking at; None for learners that keep nothing of the kind.
        """
        return None

    def forward(self, episode: Episode) -> Tensor:
        """Both phases, as in training: logits (T, N*Q, N)."""
        return self.predict(self.describe(episode.support_x, episode.support_y, episode.way), episode.query_x)

    def embed(self, x: Tensor) -> Tensor:
        """Items (T, n, *item) as keys (T, n, D), in float32 or better whatever the encoder computed in."""
        keys = self.encoder(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return keys.float() if keys.dtype in (torch.bfloat16, torch.float16) else keys

    def embed_both(self, episode: Episode) -> tuple[Tensor, Tensor]:
        """Keys of support and queries from one pass of the encoder; batch norm then sees both together."""
        split = episode.support_x.shape[1], episode.query_x.shape[1]
        keys, queries = self.embed(torch.cat([episode.support_x, episode.query_x], dim=1)).split(split, dim=1)
        return keys, queries


def count_classes(labels: Tensor, way: int | None) -> int:
    """N: as given, or read off the labels."""
    return int(labels.max()) + 1 if way is None else way


def check_way(way: int, slots: int) -> None:
    if way > slots:
        raise UserError(f"this model has {slots} label slots and cannot learn a task of {way} classes.")
