"""What every dataset becomes: items sorted by class, and where each class begins.

An `Items` is one split (train, val or test). Episodes are drawn as *positions* in it, by tensor operations on whatever
device it lives on; `gather` turns positions into what a learner eats. Images are uint8 (height, width, channels), text
is int32 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.errors import UserError

PAD, UNKNOWN, BLANK = 0, 1, 2
"""Token ids with a fixed meaning: padding behind a sentence, a word not to be seen, the word to be guessed."""


@dataclass(frozen=True)
class Items:
    """One split of an image dataset; the base of every other kind of split."""

    values: Tensor
    """(items, height, width, channels) uint8, sorted by class."""
    offsets: Tensor
    """(classes + 1) int64: class c holds the positions offsets[c] up to offsets[c + 1]."""
    names: tuple[str, ...] = ()
    """The name of each class, for error messages and pictures."""

    @property
    def classes(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        return self.offsets.diff()

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def item_shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def classes_of(self, positions: Tensor) -> Tensor:
        """The class of each of the items at these positions (any shape)."""
        return torch.searchsorted(self.offsets, positions.contiguous(), right=True) - 1

    def names_of(self, positions: Tensor) -> list[str]:
        """The class names of the items at these positions; none where classes have no names."""
        return [self.names[c] for c in self.classes_of(positions).flatten().tolist()] if self.names else []

    def gather(self, positions: Tensor) -> Tensor:
        """The items at these positions (any shape): (*positions.shape, *item_shape)."""
        return self.values[positions]

    @property
    def has_void_tasks(self) -> bool:
        """Whether some draws of classes and items are not a task; `void` then says which."""
        return False

    def void(self, positions: Tensor) -> Tensor:
        """Which tasks, given as positions (T, N, items per class), break a rule of the dataset: (T) bool."""
        return torch.zeros(positions.shape[0], dtype=torch.bool, device=positions.device)

    def with_at_least(self, size: int) -> "Items":
        """Only the classes with this many items or more; the others are left out."""
        enough = self.sizes >= size
        if bool(enough.all()):
            return self
        return self._only(enough, enough.repeat_interleave(self.sizes))

    def _only(self, classes: Tensor, items: Tensor) -> "Items":
        """The classes (bool) and their items (bool) that stay."""
        return replace(self, values=self.values[items], **self._class_fields(classes))

    def _class_fields(self, classes: Tensor) -> dict[str, Any]:
        return {"offsets": _offsets(self.sizes[classes]), "names": tuple(compress(self.names, classes.tolist()))}

    def turned(self) -> "Items":
        """Every class four times: upright, and turned by 90, 180 and 270 degrees."""
        whole = self.values.split(self.sizes.tolist())
        values = [torch.rot90(drawings, turn, (1, 2)) for drawings in whole for turn in range(4)]
        names = tuple(f"{name}/rot{90 * turn}" if turn else name for name in self.names for turn in range(4))
        return Items(torch.cat(values), _offsets(self.sizes.repeat_interleave(4)), names)

    def joined(self, others: "Items") -> "Items":
        """These classes and then those."""
        sizes = torch.cat([self.sizes, others.sizes])
        return Items(torch.cat([self.values, others.values]), _offsets(sizes), self.names + others.names)

    def to(self, device: torch.device | str) -> "Items":
        """The same items on another device. A memory-mapped array is read here, once."""
        return replace(self, values=self.values.to(device), offsets=self.offsets.to(device))


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


@dataclass(frozen=True)
class TextItems(Items):
    """One split of a text dataset: an item is a sentence with one of its words blanked, or a whole text with a label.

    `values` holds each sentence once, (sentences, length) int32, whole; an item names a sentence and the word to blank,
    so a sentence that serves many words costs its tokens once.
    """

    sentence_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """(items) int64: the row of `values` that an item shows."""
    target_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """(items) int32: the token that is blanked in it, at every place where it stands."""
    visible: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """(vocabulary) int32: the token shown in a context for each token; UNKNOWN for words held out."""
    blanked: bool = True
    """Whether items are sentences with a blank; if not, every `target_of` is -1 and texts are shown whole."""

    def gather(self, positions: Tensor) -> Tensor:
        whole = self.values[self.sentence_of[positions]]
        target = self.target_of[positions].unsqueeze(-1)
        return torch.where(whole == target, BLANK, self.visible[whole.long()])

    @property
    def has_void_tasks(self) -> bool:
        return self.blanked

    def void(self, positions: Tensor) -> Tensor:
        """A task is void if a sentence holds another of its words, or serves twice."""
        if not self.blanked:
            return super().void(positions)
        tasks, way, each = positions.shape
        sentence = self.sentence_of[positions]
        words = self.target_of[positions[:, :, 0]]
        holds = self.values[sentence].unsqueeze(-1) == words.view(tasks, 1, 1, 1, way)
        holds = holds.any(-2)  # (tasks, way, each, way): does this sentence hold that word?
        others = ~torch.eye(way, dtype=torch.bool, device=positions.device).unsqueeze(1)
        order = sentence.view(tasks, way * each).sort(-1).values
        twice = (order[:, 1:] == order[:, :-1]).any(-1)
        return (holds & others).flatten(1).any(-1) | twice

    def _only(self, classes: Tensor, items: Tensor) -> "TextItems":
        fields = self._class_fields(classes)
        return replace(self, sentence_of=self.sentence_of[items], target_of=self.target_of[items], **fields)

    def to(self, device: torch.device | str) -> "TextItems":
        moved = ("values", "offsets", "sentence_of", "target_of", "visible")
        return replace(self, **{name: getattr(self, name).to(device) for name in moved})


@dataclass(frozen=True)
class Dataset:
    """A named benchmark, ready to draw tasks from."""

    name: str
    """As on the command line: strokes, omniglot, ..."""
    splits: Mapping[str, Items]
    """train, val and test; their classes are disjoint."""
    content_hash: str
    """SHA-256 over the prepared arrays: two runs with the same hash saw the same data."""
    variant: str = ""
    """Which of several official splits or protocols; empty where there is only one."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Everything that was written down when the dataset was prepared."""
    folder: Path | None = None
    """Where the prepared arrays lie."""
    turned: bool = False
    """Whether the training classes are there turned by right angles, too, as classes of their own."""

    @property
    def item_shape(self) -> tuple[int, ...]:
        return self.splits["train"].item_shape

    @property
    def vocabulary(self) -> int:
        """The number of token ids; 0 for images."""
        train = self.splits["train"]
        return len(train.visible) if isinstance(train, TextItems) else 0

    def all_but_test(self) -> Items:
        """The training classes and, made of validation classes, more of their kind."""
        if self.vocabulary:
            raise UserError("train_on_validation is for images: words held out of a text must stay unseen.")
        held_out = self.splits["val"]
        return self.splits["train"].joined(held_out.turned() if self.turned else held_out)

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name
