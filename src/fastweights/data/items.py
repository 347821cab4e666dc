"""What every dataset becomes: items sorted by class, and where each class begins.

An `Items` is one split (train, val or test). Episodes are drawn as *positions* in it, on the device it lives on;
`gather` fetches the items. Images are uint8 (height, width, channels), text is int32 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fastweights.utils.errors import UserError
from fastweights.utils.tokens import BLANK


@dataclass(frozen=True)
class Items:
    """One split of an image dataset; the base of every other kind of split."""

    values: Tensor
    """(items, height, width, channels) uint8, sorted by class."""
    offsets: Tensor
    """(classes + 1) int64: class c holds the positions offsets[c] up to offsets[c + 1]."""
    names: tuple[str, ...] = ()
    """The name of each class, for error messages and pictures."""

    _per_item: ClassVar[tuple[str, ...]] = ("values",)
    """The tensors with a row for each item."""

    def check(self) -> None:
        """Refuse, by a ValueError, arrays that do not belong together."""
        if self.values.dtype != torch.uint8 or self.values.dim() != 4 or not self.values[:1].numel():
            raise ValueError(f"pictures of {self.values.dtype} and the shape {tuple(self.values.shape)}")
        self._check_classes()

    def _check_classes(self) -> None:
        offsets = self.offsets
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or len(offsets) < 2:
            raise ValueError(f"classes by {offsets.dtype} of the shape {tuple(offsets.shape)}")
        lengths = {len(getattr(self, name)) for name in self._per_item}
        if offsets[0] != 0 or (offsets.diff() < 0).any() or lengths != {int(offsets[-1])}:
            raise ValueError("classes that do not divide the items")
        if self.names and len(self.names) != self.classes:
            raise ValueError(f"{len(self.names)} names for {self.classes} classes")

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
    def has_invalid_tasks(self) -> bool:
        """Whether some draws of classes and items break a rule of the dataset; `invalid` says which."""
        return False

    def invalid(self, positions: Tensor) -> Tensor:
        """Which tasks, given as positions (T, N, items per class), break a rule of the dataset: (T) bool."""
        return torch.zeros(positions.shape[0], dtype=torch.bool, device=positions.device)

    def with_at_least(self, size: int) -> Self:
        """Only the classes with at least this many items."""
        enough = self.sizes >= size
        if enough.all():
            return self
        names = tuple(compress(self.names, enough.tolist()))
        kept = enough.repeat_interleave(self.sizes)
        per_item: dict[str, Any] = {name: getattr(self, name)[kept] for name in self._per_item}
        return replace(self, offsets=_offsets(self.sizes[enough]), names=names, **per_item)

    def rotated(self) -> "Items":
        """Every class four times: upright, and rotated by 90, 180 and 270 degrees."""
        whole = self.values.split(self.sizes.tolist())
        values = [torch.rot90(drawings, quarter, (1, 2)) for drawings in whole for quarter in range(4)]
        names = tuple(f"{name}/rot{90 * quarter}" if quarter else name for name in self.names for quarter in range(4))
        return Items(torch.cat(values), _offsets(self.sizes.repeat_interleave(4)), names)

    def joined(self, others: "Items") -> "Items":
        """These classes and then those."""
        sizes = torch.cat([self.sizes, others.sizes])
        return Items(torch.cat([self.values, others.values]), _offsets(sizes), self.names + others.names)

    def to(self, device: torch.device | str) -> Self:
        """The same items on another device. A memory-mapped array is read here, once."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def _check_range(name: str, values: Tensor, low: int, end: int) -> None:
    lowest, highest = (int(value) for value in values.aminmax())
    if lowest < low or highest >= end:
        raise ValueError(f"{name} from {lowest} to {highest}, not from {low} to {end - 1}")


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


@dataclass(frozen=True)
class TextItems(Items):
    """One split of a text dataset: an item is a sentence with one of its words blanked, or a whole text with a label.

    `values` holds each sentence once, (sentences, length) int32; an item names a sentence and the word to blank.
    """

    sentence_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """(items) int64: the row of `values` that an item shows."""
    target_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """(items) int32: the token that is blanked wherever it occurs in the sentence."""
    visible: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """(vocabulary) int32: what a context shows for each token; UNKNOWN for held-out words."""
    blanked: bool = True
    """Whether items are sentences with a blank; if not, every `target_of` is -1 and texts stay whole."""

    _per_item: ClassVar[tuple[str, ...]] = ("sentence_of", "target_of")

    def check(self) -> None:
        wanted = {"values": (torch.int32, 2), "sentence_of": (torch.int64, 1)}
        wanted |= {"target_of": (torch.int32, 1), "visible": (torch.int32, 1)}
        for name, (dtype, dims) in wanted.items():
            found = getattr(self, name)
            if found.dtype != dtype or found.dim() != dims or not found.numel():
                raise ValueError(f"{name} of {found.dtype} and the shape {tuple(found.shape)}")
        words = len(self.visible)
        for name, low, end in (("values", 0, words), ("visible", 0, words), ("target_of", -1, words)):
            _check_range(name, getattr(self, name), low, end)
        _check_range("sentence_of", self.sentence_of, 0, len(self.values))
        self._check_classes()

    def gather(self, positions: Tensor) -> Tensor:
        whole = self.values[self.sentence_of[positions]]
        target = self.target_of[positions].unsqueeze(-1)
        return torch.where(whole == target, BLANK, self.visible[whole.long()])

    @property
    def has_invalid_tasks(self) -> bool:
        return self.blanked

    def invalid(self, positions: Tensor) -> Tensor:
        """A task is invalid if a sentence contains another of its words, or is used twice."""
        if not self.blanked:
            return super().invalid(positions)
        tasks, way, each = positions.shape
        sentence = self.sentence_of[positions]
        words = self.target_of[positions[:, :, 0]]
        contains = self.values[sentence].unsqueeze(-1) == words.view(tasks, 1, 1, 1, way)
        contains = contains.any(-2)  # (tasks, way, each, way): is that word in this sentence?
        others = ~torch.eye(way, dtype=torch.bool, device=positions.device).unsqueeze(1)
        order = sentence.view(tasks, way * each).sort(-1).values
        twice = (order[:, 1:] == order[:, :-1]).any(-1)
        return (contains & others).flatten(1).any(-1) | twice


@dataclass(frozen=True)
class Dataset:
    """A named benchmark, ready to draw tasks from."""

    name: str
    """strokes, omniglot, ..., or the path of one's own data."""
    splits: Mapping[str, Items]
    """train, val and test; their classes are disjoint."""
    content_hash: str
    """SHA-256 over the prepared arrays: two runs with the same hash saw the same data."""
    variant: str = ""
    """Which of several official splits or protocols; empty where there is only one."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Everything recorded when the dataset was prepared."""
    folder: Path | None = None
    """Where the prepared arrays are."""
    rotated: bool = False
    """Whether training classes rotated by right angles are classes of their own."""

    @property
    def item_shape(self) -> tuple[int, ...]:
        return self.splits["train"].item_shape

    @property
    def vocabulary(self) -> int:
        """The number of token ids; 0 for images."""
        train = self.splits["train"]
        return len(train.visible) if isinstance(train, TextItems) else 0

    def with_held_out(self, *splits: str) -> Items:
        """The training classes and those of other splits together."""
        if self.vocabulary:
            raise UserError("training on validation or test classes is for images: held-out words must stay unseen.")
        items = self.splits["train"]
        for split in splits:
            more = self.splits[split]
            items = items.joined(more.rotated() if self.rotated else more)
        return items

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name
