"""Number formats: encoders may compute in bfloat16, statistics, memories and optimisers stay in float32.

Where encoders compute in bfloat16, learners that allow it have a GPU multiply float32 matrices in TF32, with 10 bits
behind the point instead of 23: several times as fast, and closer than bfloat16, which has 7.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastweights.utils.errors import UserError, unknown

PRECISIONS = ("float32", "bfloat16")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which an encoder computes."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()


def products(allows_tf32: bool, precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a learner's float32 matrices are multiplied, forwards and backwards."""
    return _tf32() if allows_tf32 and precision == "bfloat16" and device.type == "cuda" else nullcontext()


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def choose_precision(wanted: str, device: torch.device) -> str:
    """`auto` is bfloat16 on a GPU that has it, float32 elsewhere."""
    if wanted == "auto":
        return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if wanted not in PRECISIONS:
        raise unknown("precision", wanted, ("auto", *PRECISIONS))
    return wanted


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


Head = TypeVar("Head", bound=Callable[..., Any])


def full_precision(head: Head) -> Head:
    """Switch autocast off within a method that takes tensors: associations differ by little, and sums grow."""

    @functools.wraps(head)
    def run(self: nn.Module, *args: Any, **options: Any) -> Any:
        device = next(arg.device for arg in (*args, *options.values()) if isinstance(arg, Tensor))
        with torch.autocast(device.type, enabled=False):
            return head(self, *args, **options)

    return run  # type: ignore[return-value]


def check_precise(weights: Tensor) -> None:
    """Refuse weights above an encoder that are less precise than the keys which reach them."""
    if weights.dtype != at_least_float32(weights).dtype:
        raise UserError(
            f"the weights above the encoder are {weights.dtype}, but memories and answers are computed in float32 or "
            "better; call float() of the learner, and half() or bfloat16() of learner.encoder alone."
        )
