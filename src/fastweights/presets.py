"""Named learners."""

from typing import Any

from fastweights.errors import UserError
from fastweights.settings import LearnerSettings

PRESETS: dict[str, dict[str, Any]] = {"fwcnn-hebb": {"label_noise": 0.01}}


def preset(
    name: str, *, dataset: str, item_shape: tuple[int, ...], vocabulary: int, way: int, shot: int, **overrides: Any
) -> LearnerSettings:
    if name not in PRESETS:
        raise UserError(f"unknown learner {name!r}; there are {', '.join(PRESETS)}.")
    return LearnerSettings.from_json({"item_shape": item_shape, "slots": way, **PRESETS[name], **overrides})
