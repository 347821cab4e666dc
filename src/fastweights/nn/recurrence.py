"""A layer of an LSTM over sequences that gives its cells, too, and whose units may be shifted: few kernels a step.

With gates (i, f, g, o) of sigmoid, sigmoid, tanh and sigmoid units and a shift s of each sequence, if there is one,

    (i, f, g, o)_t = act(x_t + U h_{t-1}),    c_t = f_t c_{t-1} + i_t g_t,    h_t = o_t (tanh(c_t) + s)

where x_t is what the inputs give to the gates: the caller computes it for all steps in one product. The vendor's LSTM
has no place for a shift and keeps its cells to itself. Here a step is a product and a kernel, forwards and backwards,
and the gradient of U is one product over all steps. Differentiable once. Where Triton is not at hand, torch's fused
kernel of a cell does what it can.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.utils import differentiable

Triple = tuple[Tensor, Tensor, Tensor]


class LayerWeights(NamedTuple):
    """Of a layer, gates in the order input, forget, candidate, output."""

    inputs: Tensor
    """W (4 units, inputs)"""
    recurrent: Tensor
    """U (4 units, units)"""
    bias: Tensor
    """b (4 units)"""


def runs_in_waves(x: Tensor) -> bool:
    """Whether `lstm_stacks` computes with such numbers: float32 on a GPU."""
    return x.is_cuda and x.dtype == torch.float32 and has_triton()


def lstm_stacks(
    stacks: Sequence[Sequence[LayerWeights]],
    words: Sequence[Tensor],
    mask: Tensor | None = None,
    shifts: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and cells (D, L, B, units) of each of several stacks of D layers and one size, all at the same time.

    Each reads words (L, B, inputs), of as many sentences B as there are for it. A single stack may have a `mask`
    (D - 1, L, B, units), by which outputs are multiplied on their way up, and `shifts` (D, B, units).
    """
    from fastweights.kernels.lstm import run_stacks  # deferred: needs a GPU and Triton

    layers, sentences = len(stacks[0]), [each.shape[1] for each in words]
    gates = [F.linear(each, stack[0].inputs, stack[0].bias) for each, stack in zip(words, stacks, strict=True)]
    padded = [_with_sentences(each, max(sentences)) for each in gates]
    own = [stack[layer].recurrent for layer in range(layers) for stack in stacks]
    below = [stack[layer].inputs for layer in range(1, layers) for stack in stacks]
    weights = torch.stack([*own, *below]).unflatten(0, (-1, len(stacks)))
    biases = [stack[layer].bias for layer in range(1, layers) for stack in stacks]
    outputs, cells = run_stacks(
        torch.stack(padded) if len(stacks) > 1 else padded[0].unsqueeze(0),
        weights,
        torch.stack(biases).unflatten(0, (-1, len(stacks))) if biases else gates[0].new_empty(0),
        None if mask is None else mask.unsqueeze(1),
        None if shifts is None else shifts.unsqueeze(1),
    )
    return [(outputs[:, i, :, :count], cells[:, i, :, :count]) for i, count in enumerate(sentences)]


def _with_sentences(gates: Tensor, count: int) -> Tensor:
    """Gates (L, B, 4 units), and zeros for further sentences."""
    return F.pad(gates, (0, 0, 0, count - gates.shape[1])) if gates.shape[1] < count else gates


def lstm_layer(inputs: Tensor, recurrent: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs h and cells c (L, B, units) of a layer that starts from zeros.

    `inputs` x are (L, B, 4 units), `recurrent` weights U (4 units, units), a shift s is (B, units).
    """
    if runs_in_waves(inputs):
        from fastweights.kernels.lstm import run_stacks  # deferred: needs a GPU and Triton

        shifts, no_bias = None if shift is None else shift[None, None], inputs.new_empty(0)
        outputs, cells = run_stacks(inputs.unsqueeze(0), recurrent[None, None], no_bias, None, shifts)
        return outputs[0, 0], cells[0, 0]
    return _Layer.apply(inputs, recurrent, shift)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, recurrent: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        units, steps = recurrent.shape[1], []
        hidden = cell = inputs.new_zeros(inputs.shape[1], units)
        for x in inputs:
            hidden, cell, gates = lstm_cell(x, hidden @ recurrent.mT, cell)
            if shift is not None:
                hidden = torch.addcmul(hidden, gates[:, -units:], shift)
            steps.append((hidden, cell, gates))
        outputs, cells, gates = (torch.stack(each) for each in zip(*steps, strict=True))
        ctx.save_for_backward(recurrent, shift, outputs, cells, gates)
        ctx.set_materialize_grads(False)
        return outputs, cells

    @staticmethod
    @differentiable.once("lstm_layer can be differentiated once only")
    def backward(ctx: Any, at_outputs: Tensor | None, at_cells: Tensor | None) -> tuple[Tensor | None, ...]:
        recurrent, shift, outputs, cells, gates = ctx.saved_tensors
        units, exits = recurrent.shape[1], gates[..., -recurrent.shape[1] :]
        through_exits = None if shift is None else shift * exits * (1 - exits)
        at_hidden = torch.zeros_like(outputs) if at_outputs is None else at_outputs
        nothing = torch.zeros_like(cells[0])
        at_cell, d_inputs, d_hidden = nothing, list[Tensor](), list[Tensor]()
        for t in reversed(range(len(cells))):
            d_hidden.append(torch.addmm(at_hidden[t], d_inputs[-1], recurrent) if d_inputs else at_hidden[t])
            at_cell = at_cell if at_cells is None else at_cell + at_cells[t]
            before = cells[t - 1] if t else nothing
            at_gates, at_cell = lstm_cell_backward(d_hidden[-1], at_cell, before, cells[t], gates[t])
            if through_exits is not None:
                at_gates[:, -units:].addcmul_(d_hidden[-1], through_exits[t])
            d_inputs.append(at_gates)
        d_x = torch.stack(d_inputs[::-1])
        d_recurrent = d_x[1:].flatten(0, 1).mT @ outputs[:-1].flatten(0, 1)
        d_shift = None if shift is None else (torch.stack(d_hidden[::-1]) * exits).sum(0)
        return d_x, d_recurrent, d_shift


def lstm_cell(x: Tensor, y: Tensor, cell: Tensor) -> Triple:
    """Output without a shift, next cell and activated gates, from the two parts of the gates (B, 4 units)."""
    if x.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell(x, y, cell)
    i, f, g, o = (x + y).chunk(4, -1)
    gates = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], -1)
    i, f, g, o = gates.chunk(4, -1)
    cell = torch.addcmul(f * cell, i, g)
    return o * cell.tanh(), cell, gates


def lstm_cell_backward(
    at_output: Tensor, at_cell: Tensor, before: Tensor, cell: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients at the gates (B, 4 units), before their activation, and at the cell before."""
    if gates.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell_backward_impl(at_output, at_cell, before, cell, gates, False)[:2]
    i, f, g, o = gates.chunk(4, -1)
    squashed = cell.tanh()
    at_cell = at_cell + at_output * o * (1 - squashed.square())
    at_gates = (
        at_cell * g * i * (1 - i),
        at_cell * before * f * (1 - f),
        at_cell * i * (1 - g.square()),
        at_output * squashed * o * (1 - o),
    )
    return torch.cat(at_gates, -1), at_cell * f
