"""How inputs become keys: by a model of pictures, by an encoder of anything, above either nothing or an adapter.

With neither, inputs are embeddings: an array (examples, features).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.classifier.adapter import Adapter, is_adapter, load_adapter
from fastweights.classifier.calibration import Calibration
from fastweights.classifier.encoders import Encoder, Skip, encoder_of
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import batches
from fastweights.classifier.memory import unit
from fastweights.classifier.models import Model, find_model, find_text_model
from fastweights.classifier.texts import NAME, hashed_texts
from fastweights.data.ink import Look


@dataclass(frozen=True)
class Encoded:
    """Some inputs as keys."""

    keys: np.ndarray
    places: list[int]
    """Which of the inputs these are; those that could not be read are left out."""
    looks: list[Look] = field(default_factory=list)
    """What pictures look like; empty for other inputs."""


@dataclass(frozen=True)
class Sight:
    """At most one of a model and an encoder, and perhaps an adapter."""

    model: Model | None = None
    encoder: Encoder | None = None
    adapter: Adapter | None = None

    @property
    def takes_arrays(self) -> bool:
        """Whether inputs are embeddings."""
        return self.model is None and self.encoder is None

    @property
    def name(self) -> str:
        return self.model.name if self.model else self.encoder.name if self.encoder else "embeddings"

    @property
    def item(self) -> str:
        """What an input is called in a sentence."""
        if self.model is not None:
            return "picture"
        return "item" if self.encoder is None or self.encoder.kind == "given" else "text"

    @property
    def identity(self) -> tuple[str, str, str]:
        """Differs for what makes other keys of the same inputs."""
        model, encoder, adapter = self.model, self.encoder, self.adapter
        seen = "" if encoder is None else encoder.weights or encoder.source
        return model.digest if model else "", seen, adapter.digest if adapter else ""

    @property
    def calibration(self) -> Calibration | None:
        """What is known of how sure to be, of the last of them."""
        last = self.adapter or self.encoder or self.model
        return None if last is None else last.calibration

    @property
    def width(self) -> int | None:
        """The width of keys; None where only asking can tell."""
        last = self.adapter or self.model or self.encoder
        return None if last is None else last.width

    def of_arrays(self, embeddings: np.ndarray) -> np.ndarray:
        """Embeddings, or the vectors of an encoder, as unit keys."""
        return unit(embeddings) if self.adapter is None else self.adapter.keys(embeddings)

    def encode(
        self,
        inputs: Sequence[Any],
        *,
        cache: Path | str | None = None,
        skip: Skip | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Encoded]:
        """Unit keys of inputs, a batch at a time."""
        if self.model is not None:
            for batch in batches(inputs, self.model.preparation, skip=skip, progress=progress):
                yield Encoded(self.model.keys(batch.pixels), batch.places, batch.looks)
        if self.encoder is not None:
            for vectors, places in self.encoder.encode(inputs, cache=cache, skip=skip, progress=progress):
                yield Encoded(self.of_arrays(vectors), places)


def find_sight(model: Any, encoder: Any, prepare: Any, device: str) -> Sight:
    """What is meant by the parameters of a classifier."""
    if prepare is not None and encoder is None:
        raise InputError("prepare= prepares items for an encoder; give encoder=, too.")
    found = None if encoder is None else encoder_of(encoder, prepare)
    if model is None:
        return Sight(encoder=found)
    if isinstance(model, Adapter):
        return Sight(encoder=found, adapter=model)
    if is_adapter(model):
        return Sight(encoder=found, adapter=load_adapter(model))
    if found is not None:
        raise InputError("give a model or an encoder, not both; only an adapter goes above an encoder.")
    if model == NAME:
        return Sight(encoder=hashed_texts())
    words = find_text_model(model, device)
    return Sight(encoder=words) if words is not None else Sight(model=find_model(model, device))
