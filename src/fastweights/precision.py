"""Number formats: encoders may compute in bfloat16, statistics, memories and optimisers stay in float32."""

from contextlib import AbstractContextManager, nullcontext

import torch

from fastweights.errors import UserError

PRECISIONS = ("float32", "bfloat16")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which an encoder computes."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()


def choose_precision(wanted: str, device: torch.device) -> str:
    """`auto` is bfloat16 on a GPU that has it, float32 elsewhere."""
    if wanted == "auto":
        return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if wanted not in PRECISIONS:
        raise UserError(f"unknown --precision {wanted!r}; there are auto, {' and '.join(PRECISIONS)}.")
    return wanted
