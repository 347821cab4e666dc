"""Stacks of LSTM layers on a GPU, several of them side by side, with shifted units: a product and a kernel for a word.

`nn.recurrence.lstm_layer` has the equations of a layer and is the reference; tests compare values and gradients. A
layer reads word t when the layer below has read it and the layer above reads word t - 1: in each *wave* all layers of
all stacks take a step, their products with the states of the wave before being one batched product, and one kernel does
the rest. Backward likewise, from the last wave; the gradients of all weights are one batched product over the waves.

Shapes: D layers, G stacks, L words, B sentences, U units, and 2 D - 1 products: of each layer with its own last state
and, above the first, with the state of the layer below. Gates are in torch's order. Everything is float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.mann import _sigmoid, _tanh
from fastweights.utils import differentiable

WARPS = 4
SIZES = ["wave", "stacks", "words", "sentences"]
"""Sizes that kernels are not specialised for: the first waves would be compiled apart."""


@triton.jit
def _place(wave, stacks, sentences):
    """Of a program: its layer, stack and sentence, and the word it would read."""
    row = tl.program_id(0).to(tl.int64)
    layer = row // (stacks * sentences)
    return layer, row // sentences % stacks, row % sentences, wave - layer


@triton.jit(do_not_specialize=SIZES)
def _wave_kernel(
    inputs, biases, products, mask, shifts, gates, cells, outputs, states, wave, stacks, words, sentences,
    LAYERS: tl.constexpr, MASKED: tl.constexpr, SHIFTED: tl.constexpr, KEEPS: tl.constexpr, U: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`products` are (2 D - 1, G, B, 4 U), `states` (2 D - 1, G, waves + 1, B, U)."""
    layer, stack, sentence, word = _place(wave, stacks, sentences)
    u = tl.arange(0, BLOCK)
    words_read, layers = word + 0 * u, layer + 0 * u
    inside, active, waves = u < U, (words_read >= 0) & (words_read < words), words + LAYERS - 1
    at = layer * stacks + stack  # of all that has a row for each layer and stack
    here = ((at * words + word) * sentences + sentence) * U + u
    own = products + (at * sentences + sentence) * 4 * U + u
    below = products + (((LAYERS - 1 + layer) * stacks + stack) * sentences + sentence) * 4 * U + u
    x = inputs + ((stack * words + word) * sentences + sentence) * 4 * U + u
    bias = biases + ((layer - 1) * stacks + stack) * 4 * U + u
    first, upper = inside & active & (layers == 0), inside & active & (layers > 0)
    i = tl.load(x, mask=first, other=0.0) + tl.load(own, mask=inside, other=0.0)
    i = _sigmoid(i + tl.load(below, mask=upper, other=0.0) + tl.load(bias, mask=upper, other=0.0))
    f = tl.load(x + U, mask=first, other=0.0) + tl.load(own + U, mask=inside, other=0.0)
    f = _sigmoid(f + tl.load(below + U, mask=upper, other=0.0) + tl.load(bias + U, mask=upper, other=0.0))
    g = tl.load(x + 2 * U, mask=first, other=0.0) + tl.load(own + 2 * U, mask=inside, other=0.0)
    g = _tanh(g + tl.load(below + 2 * U, mask=upper, other=0.0) + tl.load(bias + 2 * U, mask=upper, other=0.0))
    o = tl.load(x + 3 * U, mask=first, other=0.0) + tl.load(own + 3 * U, mask=inside, other=0.0)
    o = _sigmoid(o + tl.load(below + 3 * U, mask=upper, other=0.0) + tl.load(bias + 3 * U, mask=upper, other=0.0))
    c = f * tl.load(cells + here - sentences * U, mask=inside & active & (words_read > 0), other=0.0) + i * g
    h = _tanh(c)
    if SHIFTED:
        h += tl.load(shifts + (at * sentences + sentence) * U + u, mask=inside, other=0.0)
    h *= o
    stored = inside & active
    if KEEPS:
        to = gates + ((at * words + word) * sentences + sentence) * 4 * U + u
        tl.store(to, i, mask=stored)
        tl.store(to + U, f, mask=stored)
        tl.store(to + 2 * U, g, mask=stored)
        tl.store(to + 3 * U, o, mask=stored)
    tl.store(cells + here, c, mask=stored)
    tl.store(outputs + here, h, mask=stored)
    h = tl.where(active, h, 0.0)
    next_state = ((wave + 1) * sentences + sentence) * U + u
    tl.store(states + at * (waves + 1) * sentences * U + next_state, h, mask=inside)
    if LAYERS > 1:
        lower = inside & (layers < LAYERS - 1)
        if MASKED:
            h *= tl.load(mask + here, mask=lower & active, other=0.0)
        above = (LAYERS + layer) * stacks + stack
        tl.store(states + above * (waves + 1) * sentences * U + next_state, h, mask=lower)


@triton.jit(do_not_specialize=SIZES)
def _wave_grad_kernel(
    gates, cells, mask, shifts, at_outputs, at_cells, d_states, d_cell, d_shift, d_products,
    wave, stacks, words, sentences, LAYERS: tl.constexpr, MASKED: tl.constexpr, SHIFTED: tl.constexpr,
    OUTPUTS: tl.constexpr, CELLS: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`d_states` (2 D - 1, G, B, U) are the gradients at the states behind this wave, `d_products` (2 D - 1, G, waves,
    B, 4 U) those at the products; `d_cell` and `d_shift` (D, G, B, U) go on from wave to wave."""
    layer, stack, sentence, word = _place(wave, stacks, sentences)
    u = tl.arange(0, BLOCK)
    words_read, layers, waves = word + 0 * u, layer + 0 * u, words + LAYERS - 1
    inside = (u < U) & (words_read >= 0) & (words_read < words)
    at = layer * stacks + stack
    here, kept = ((at * words + word) * sentences + sentence) * U + u, (at * sentences + sentence) * U + u
    source = gates + ((at * words + word) * sentences + sentence) * 4 * U + u
    i, f = tl.load(source, mask=inside, other=0.0), tl.load(source + U, mask=inside, other=0.0)
    g, o = tl.load(source + 2 * U, mask=inside, other=0.0), tl.load(source + 3 * U, mask=inside, other=0.0)
    squashed = _tanh(tl.load(cells + here, mask=inside, other=0.0))
    before = tl.load(cells + here - sentences * U, mask=inside & (words_read > 0), other=0.0)
    dh = tl.load(d_states + kept, mask=inside, other=0.0)
    if OUTPUTS:
        dh += tl.load(at_outputs + here, mask=inside, other=0.0)
    if LAYERS > 1:
        lower = inside & (layers < LAYERS - 1)
        above = (((LAYERS + layer) * stacks + stack) * sentences + sentence) * U + u
        from_above = tl.load(d_states + above, mask=lower, other=0.0)
        if MASKED:
            from_above *= tl.load(mask + here, mask=lower, other=0.0)
        dh += from_above
    dc = tl.load(d_cell + kept, mask=inside, other=0.0) + dh * o * (1 - squashed * squashed)
    if CELLS:
        dc += tl.load(at_cells + here, mask=inside, other=0.0)
    opened = squashed
    if SHIFTED:
        opened += tl.load(shifts + kept, mask=inside, other=0.0)
        tl.store(d_shift + kept, tl.load(d_shift + kept, mask=inside, other=0.0) + dh * o, mask=inside)
    tl.store(d_cell + kept, dc * f, mask=inside)
    row = (wave * sentences + sentence) * 4 * U + u
    at_i, at_f = dc * g * i * (1 - i), dc * before * f * (1 - f)
    at_g, at_o = dc * i * (1 - g * g), dh * opened * o * (1 - o)
    to = d_products + at * waves * sentences * 4 * U + row
    tl.store(to, at_i, mask=u < U)  # zeros where there is no word
    tl.store(to + U, at_f, mask=u < U)
    tl.store(to + 2 * U, at_g, mask=u < U)
    tl.store(to + 3 * U, at_o, mask=u < U)
    if LAYERS > 1:
        upper = (u < U) & (layers > 0)
        to = d_products + ((LAYERS - 1 + layer) * stacks + stack) * waves * sentences * 4 * U + row
        tl.store(to, at_i, mask=upper)
        tl.store(to + U, at_f, mask=upper)
        tl.store(to + 2 * U, at_g, mask=upper)
        tl.store(to + 3 * U, at_o, mask=upper)


def run_stacks(
    inputs: Tensor, weights: Tensor, biases: Tensor, mask: Tensor | None = None, shifts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs and cells (D, G, L, B, U) of stacks that start from zeros.

    `inputs` (G, L, B, 4 U) are what the words give to the gates of the first layers. `weights` (2 D - 1, G, 4 U, U) are
    those of each layer's own state, then of the state of the layer below; `biases` (D - 1, G, 4 U), above the first.
    States are multiplied by a `mask` (D - 1, G, L, B, U) on their way up. `shifts` (D, G, B, U) are added to tanh(c).
    """
    return _Stacks.apply(inputs, weights, torch.is_grad_enabled(), biases, mask, shifts)


class _Stacks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: Tensor, keeps: bool, *others: Tensor | None) -> Any:
        inputs, weights = inputs.contiguous(), weights.contiguous()
        biases, mask, shifts = (None if one is None else one.contiguous() for one in others)
        (stacks, words, sentences, _), (count, _, _, units) = inputs.shape, weights.shape
        layers = (count + 1) // 2
        waves, sizes = words + layers - 1, (layers, stacks, words, sentences)
        outputs, cells = inputs.new_empty(*sizes, units), inputs.new_empty(*sizes, units)
        gates = inputs.new_empty(*sizes, 4 * units) if keeps else cells
        states = inputs.new_empty(count, stacks, waves + 1, sentences, units)
        states[:, :, 0].zero_()
        by_product, up = states.flatten(0, 1), weights.flatten(0, 1).mT
        for wave in range(waves):
            _wave_kernel[(layers * stacks * sentences,)](
                inputs, biases, torch.bmm(by_product[:, wave], up), inputs if mask is None else mask,
                inputs if shifts is None else shifts, gates, cells, outputs, states, wave, stacks, words, sentences,
                layers, mask is not None, shifts is not None, keeps, **_options(units),
            )  # fmt: skip
        if keeps:
            ctx.save_for_backward(weights, mask, shifts, gates, cells, states)
        ctx.set_materialize_grads(False)
        return outputs, cells

    @staticmethod
    @differentiable.once("the fused LSTM can be differentiated once only")
    def backward(ctx: Any, at_outputs: Tensor | None, at_cells: Tensor | None) -> Any:
        weights, mask, shifts, gates, cells, states = ctx.saved_tensors
        (layers, stacks, words, sentences, units), (count, _, places, *_) = cells.shape, states.shape
        waves, has_outputs, has_cells = places - 1, at_outputs is not None, at_cells is not None
        at_outputs, at_cells = (cells if one is None else one.contiguous() for one in (at_outputs, at_cells))
        d_products = gates.new_empty(count, stacks, waves, sentences, 4 * units)
        d_cell, d_shift = (cells.new_zeros(layers, stacks, sentences, units) for _ in range(2))
        d_states = cells.new_zeros(count * stacks, sentences, units)
        down, by_product = weights.flatten(0, 1), d_products.flatten(0, 1)
        for wave in reversed(range(waves)):
            _wave_grad_kernel[(layers * stacks * sentences,)](
                gates, cells, cells if mask is None else mask, cells if shifts is None else shifts, at_outputs,
                at_cells, d_states, d_cell, d_shift, d_products, wave, stacks, words, sentences,
                layers, mask is not None, shifts is not None, has_outputs, has_cells, **_options(units),
            )  # fmt: skip
            if wave:
                d_states = torch.bmm(by_product[:, wave], down)
        d_weights = torch.bmm(by_product.flatten(1, 2).mT, states.flatten(0, 1)[:, :-1].flatten(1, 2))
        d_biases = d_products[1:layers].sum((2, 3))
        return (
            d_products[0, :, :words],
            d_weights.view_as(weights),
            None,
            d_biases,
            None,
            None if shifts is None else d_shift,
        )


def _options(units: int) -> dict[str, Any]:
    return {"U": units, "BLOCK": triton.next_power_of_2(units), "num_warps": WARPS}
