"""Backward passes that can be run once, and say so when somebody wants to differentiate them again."""

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def once(refusal: str) -> Callable[[Backward], Backward]:
    """Have a `backward` refuse second derivatives in these words.

    torch's `once_differentiable` does not notice a gradient that is constant, as under a sum, nor `autograd.grad` by
    chosen inputs: second derivatives would lack a part, or be zero.
    """

    def refusing(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(refusal)
            return backward(ctx, *grads)

        return run

    return refusing
