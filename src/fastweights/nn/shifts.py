"""Conditionally shifted neurons (Munkhdalai et al., 2018): what all networks with them share, as pure tensor functions.

In the description phase every support example i leaves a key k_i, by a network of its own, and for each shifted layer a
shift for every neuron of it, v_i = g(I_i): an MLP g maps the *conditioning information* I_i of each neuron by itself. A
query with key k adds to its neurons the shifts of the examples that it resembles:

    b = sum_i softmax_i(k . k_i) v_i,    h = act(a) + act(b);    at the logits a + b

There are two kinds of information for a neuron with the pre-activation a:

- `gradient`, dL/da: one number, given to g by its logarithm and sign.
- `df`, direct feedback, act'(a) dL/dz with z the logits: one number per logit, and no pass backwards.

At the logits both are dL/dz, one number for each logit.

Shapes: T tasks, n support examples, q queries, U the shape of a layer's activations, C logits. A memory of shifts is
plain tensors, keys (T, n, D) and for each layer shifts (T, n, *U); examples are added by concatenation.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.nn.coordinates import coordinate_mlp, map_coordinates
from fastweights.nn.init import SLOPE
from fastweights.nn.norms import unit_norm

MOST_EXAMPLES = 128
"""Examples of a task whose shifts the fused kernels read; more are left to the vendor's matrix products."""
SIMILARITIES = ("dot", "scaled", "cosine")
"""How queries are compared with keys: by dot products, by these over the square root of their width, by cosines."""


class ShiftMap(nn.Module):
    """g: the conditioning information of a neuron (..., inputs) -> its shift (...), the same MLP for every neuron.

    Three layers with leaky ReLU, `hidden` units in each of the first two.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.mlp = coordinate_mlp(inputs, hidden)

    def forward(self, information: Tensor) -> Tensor:
        return self.mlp(information).squeeze(-1)


class GradientMap(ShiftMap):
    """g of error gradients: any tensor of them -> shifts of the same shape."""

    def __init__(self, hidden: int) -> None:
        super().__init__(2, hidden)

    def forward(self, gradient: Tensor) -> Tensor:
        return map_coordinates(gradient, self.mlp)


def output_error(logits: Tensor, labels: Tensor) -> Tensor:
    """dL/dz of the cross-entropy of each example by itself: logits (T, n, C), labels (T, n) -> (T, n, C)."""
    return logits.softmax(-1) - F.one_hot(labels, logits.shape[-1]).to(logits.dtype)


def direct_feedback(derivative: Tensor, error: Tensor) -> Tensor:
    """act'(a) of neurons (T, n, *U) times the error at the logits (T, n, C): (T, n, *U, C)."""
    layer = derivative.dim() - error.dim() + 1
    return derivative.unsqueeze(-1) * error.reshape(*error.shape[:-1], *[1] * layer, error.shape[-1])


class FeedbackShifts(NamedTuple):
    """The shifts of a layer of leaky ReLUs by direct feedback, of which an example has two: above and below zero."""

    active: Tensor
    """Which of the neurons (T, n, *U) are above zero."""
    kinds: Tensor
    """The shifts of those above and of those below, (T, n, 2)."""


Shifts = Tensor | FeedbackShifts
"""The examples' shifts of one layer, (T, n, *U)."""


def of_neurons(shifts: Shifts) -> Tensor:
    """(T, n, *U)."""
    if isinstance(shifts, Tensor):
        return shifts
    shape = (*shifts.active.shape[:2], *[1] * (shifts.active.dim() - 2))
    above, below = shifts.kinds.unbind(-1)
    return torch.where(shifts.active, above.reshape(shape), below.reshape(shape))


def leaky_feedback_shifts(
    shift_map: ShiftMap, active: Sequence[Tensor], error: Tensor, slope: float
) -> list[FeedbackShifts]:
    """The shifts of layers of leaky ReLUs by direct feedback: what is above zero in each (T, n, *U); error (T, n, C).

    The derivative of a leaky ReLU is 1 or its slope, so an example has two kinds of neurons and g is computed twice for
    all layers, not once for each neuron: the same as `shift_map(direct_feedback(derivative, error))` of each layer.
    """
    kinds = shift_map(torch.stack([error, slope * error], dim=2))
    return [FeedbackShifts(each, kinds) for each in active]


def attend(queries: Tensor, keys: Tensor, similarity: str = "dot", present: Tensor | None = None) -> Tensor:
    """Attention (T, q, n) of queries (T, q, D) over keys (T, n, D), of which only those `present` (T, n) count."""
    if similarity == "cosine":
        queries, keys = unit_norm(queries), unit_norm(keys)
    if similarity == "scaled":
        queries = queries / math.sqrt(queries.shape[-1])
    scores = queries @ keys.mT
    if present is not None:  # a task of nothing but absent examples has no attention, rather than NaN
        scores = scores.masked_fill(~present.unsqueeze(1), torch.finfo(scores.dtype).min)
        return scores.softmax(-1) * present.unsqueeze(1)
    return scores.softmax(-1)


def read_shifts(attention: Tensor, shifts: Tensor) -> Tensor:
    """The shifts of queries: attention (T, q, n) over the examples' shifts (T, n, *U) -> (T, q, *U)."""
    return (attention @ shifts.flatten(2)).unflatten(2, shifts.shape[2:])


def add_shift(a: Tensor, shift: Tensor, slope: float = SLOPE) -> Tensor:
    """act(a) + act(b) with a leaky ReLU."""
    return F.leaky_relu(a, slope) + F.leaky_relu(shift, slope)


def shifted_activation(a: Tensor, attention: Tensor, shifts: Shifts, slope: float = SLOPE) -> Tensor:
    """act(a) + act(b) of neurons a (T q, *U), b read by attention (T, q, n) from the examples' shifts (T, n, *U)."""
    if not _can_be_fused(a, attention, shifts):
        shift = read_shifts(attention.to(a.dtype), of_neurons(shifts).to(a.dtype))
        return add_shift(a, shift.view_as(a), slope)
    from fastweights.kernels.shifted import shifted_activation as fused  # deferred: needs a GPU and Triton

    each, kinds = shifts if isinstance(shifts, FeedbackShifts) else (shifts, None)
    if channels_innermost(a):
        return fused(a.movedim(1, -1), attention, each.movedim(2, -1), kinds, slope).movedim(-1, 1)
    return fused(a, attention, each, kinds, slope)


def channels_innermost(x: Tensor) -> bool:
    """Whether x (n, C, H, W) lies in memory as (n, H, W, C)."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _can_be_fused(a: Tensor, attention: Tensor, shifts: Shifts) -> bool:
    """Whether the fused kernels compute this: on a GPU, in float32 but for a, and examples that are not too many."""
    numbers = shifts.kinds if isinstance(shifts, FeedbackShifts) else shifts
    return (
        a.is_cuda
        and a.dtype in (torch.float32, torch.bfloat16)
        and attention.dtype == numbers.dtype == torch.float32
        and 0 < attention.shape[-1] <= MOST_EXAMPLES
        and a.numel() > 0
        and has_triton()
    )
