"""Batch norm by each task's own statistics, 2x2 max-pooling and leaky ReLU on a GPU, differentiable twice.

y = leaky_relu(max_pool(g x^ + b)) for tasks x (T, n, H, W, C) with gains and biases (T, C). Pooling and activation only
choose and scale: with d the gradient at y, put back to the pixels that won and scaled there, and 0 elsewhere, the first
and second derivatives are those of the batch norm alone, which `nn.batch_statistics` writes out. Which pixel won, and
whether it is above zero, is kept in a byte (`code`).

The value and each derivative are two passes over the activations: one sums by task and channel, in float32, the other
adds up the partial sums of the first and writes all results.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels import per_task
from fastweights.kernels.batch_norm import channels_at_once

LAUNCH = {
    "sums": (2048, 4),
    "value": (1024, 4),
    "gradient_sums": (1024, 4),
    "gradient": (1024, 4),
    "second_sums": (1024, 4),
    "second": (512, 4),
}
"""Numbers per block, of pixels (`sums`) or of squares of four pixels, and warps, of each kernel."""
FULL = 8 * 132
"""Programs, about: enough to fill the largest GPUs."""
SUMS, AT_LEAST, ROWS = 128, 4, 32
"""Partial sums of a task and channel, at most; blocks of each, if there are so many; how many are read at once."""
LEAST_CHANNELS = 16
"""Channels come in multiples of so many."""
SIZES = ["pixels", "pooled", "programs", "H", "W", "HP", "WP"]
"""Sizes that kernels are not specialised for."""


@triton.jit
def _channels(C: tl.constexpr, CHANNELS: tl.constexpr):
    """Of a program: its task, its channels, and where these are in tensors (T, C)."""
    task = tl.program_id(1).to(tl.int64)
    f = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    return task, f, task * C + f


@triton.jit
def _keep(partial, number, sums, C: tl.constexpr, f, SUMS: tl.constexpr):
    """Write a program's partial sum number `number` of `SUMS`."""
    row = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * SUMS + number
    tl.store(partial + row * C + f, tl.sum(sums, axis=0))


@triton.jit
def _total(partial, number, programs, f, C: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr):
    """The sum number `number` of a task, from the partial sums of all programs."""
    total = tl.zeros(f.shape, dtype=partial.dtype.element_ty)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        at = ((tl.program_id(1).to(tl.int64) * programs + row) * SUMS + number)[:, None] * C + f[None, :]
        total += tl.sum(tl.load(partial + at, mask=(row < programs)[:, None], other=0), axis=0)
    return total


@triton.jit
def _corner(at, valid, s: tl.constexpr, H, W, HP, WP):
    """Of the four pixels of squares, number s: which of the task's pixels it is, and whether it is in the image."""
    n, rest = at // (HP * WP), at % (HP * WP)
    y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
    return (n * H + y) * W + x, (valid & (y < H) & (x < W))[:, None]


@triton.jit
def _normal(
    x, at, valid, s: tl.constexpr, f, centre, scale, shift, H, W, HP, WP, C: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """The normalised pixels number s of squares."""
    pixel, inside = _corner(at, valid, s, H, W, HP, WP)
    value = tl.load(x + pixel[:, None] * C + f[None, :], mask=inside, other=0).to(SUM)
    return (value - centre[None, :]) * scale[None, :] + shift[None, :]


@triton.jit
def _winners(dy, code, at, valid, f, C: tl.constexpr, SLOPE: tl.constexpr, SUM: tl.constexpr):
    """Of squares: which pixel won, by what its value was scaled, and the gradient that it gets."""
    place, inside = at[:, None] * C + f[None, :], valid[:, None]
    code = tl.load(code + place, mask=inside, other=0).to(tl.int32)
    scale = tl.where(code >= 4, 1.0, SLOPE).to(SUM)
    return code % 4, scale, scale * tl.load(dy + place, mask=inside, other=0).to(SUM)


@triton.jit(do_not_specialize=SIZES)
def _sums_kernel(x, partial, pixels, C: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of x and of its square, both from the task's first pixel on: little is lost where means are large."""
    task, f, _ = _channels(C, CHANNELS)
    SUM: tl.constexpr = partial.dtype.element_ty
    x += task * pixels * C
    first = tl.load(x + f).to(SUM)[None, :]
    sums = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    squares = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < pixels)[:, None]
        value = tl.load(x + at[:, None] * C + f[None, :], mask=inside, other=0).to(SUM)
        value = tl.where(inside, value - first, 0.0)
        sums += value
        squares += value * value
    _keep(partial, 0, sums, C, f, 2)
    _keep(partial, 1, squares, C, f, 2)


@triton.jit(do_not_specialize=SIZES)
def _value_kernel(
    x, partial, gain, bias, y, code, mean, r, pixels, pooled, programs, gain_apart, bias_apart, H, W, HP, WP,
    EPS: tl.constexpr, SLOPE: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise, pool and activate; the first program of a task writes its mean and r."""
    task, f, known = _channels(C, CHANNELS)
    SUM: tl.constexpr = partial.dtype.element_ty
    x += task * pixels * C
    off = _total(partial, 0, programs, f, C, 2, ROWS) / pixels
    variance = _total(partial, 1, programs, f, C, 2, ROWS) / pixels - off * off
    centre = tl.load(x + f).to(SUM) + off
    factor = 1 / tl.sqrt(tl.maximum(variance, 0.0) + EPS)
    if tl.program_id(0) == 0:
        tl.store(mean + known, centre)
        tl.store(r + known, factor)
    scale = factor * tl.load(gain + task * gain_apart + f).to(SUM)
    shift = tl.load(bias + task * bias_apart + f).to(SUM)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        best = _normal(x, at, valid, 0, f, centre, scale, shift, H, W, HP, WP, C, SUM)
        won = tl.zeros((BLOCK, CHANNELS), dtype=tl.int32)
        for s in tl.static_range(1, 4):
            _, inside = _corner(at, valid, s, H, W, HP, WP)
            value = _normal(x, at, valid, s, f, centre, scale, shift, H, W, HP, WP, C, SUM)
            better = inside & (value > best)
            best = tl.where(better, value, best)
            won = tl.where(better, s, won)
        place = task * pooled * C + at[:, None] * C + f[None, :]
        tl.store(code + place, tl.where(best > 0, won + 4, won).to(tl.int8), mask=valid[:, None])
        tl.store(y + place, tl.where(best > 0, best, SLOPE * best).to(y.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=SIZES)
def _gradient_sums_kernel(
    dy, x, code, mean, r, partial, pixels, pooled, H, W, HP, WP, SLOPE: tl.constexpr, C: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of d and of d x^."""
    task, f, known = _channels(C, CHANNELS)
    SUM: tl.constexpr = partial.dtype.element_ty
    x, dy, code = x + task * pixels * C, dy + task * pooled * C, code + task * pooled * C
    centre, factor = tl.load(mean + known)[None, :], tl.load(r + known)[None, :]
    sums = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    products = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        won, _, d = _winners(dy, code, at, valid, f, C, SLOPE, SUM)
        winner = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
        for s in tl.static_range(4):
            pixel, inside = _corner(at, valid, s, H, W, HP, WP)
            value = tl.load(x + pixel[:, None] * C + f[None, :], mask=inside, other=0).to(SUM)
            winner = tl.where(won == s, value, winner)
        sums += d
        products += d * (winner - centre) * factor
    _keep(partial, 0, sums, C, f, 2)
    _keep(partial, 1, products, C, f, 2)


@triton.jit(do_not_specialize=SIZES)
def _gradient_kernel(
    dy, x, code, gain, mean, r, partial, dx, d_gain, d_bias, pixels, pooled, programs, gain_apart, H, W, HP, WP,
    SLOPE: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = g r P d, and the gradients of gain and bias."""
    task, f, known = _channels(C, CHANNELS)
    SUM: tl.constexpr = partial.dtype.element_ty
    x, dx = x + task * pixels * C, dx + task * pixels * C
    dy, code = dy + task * pooled * C, code + task * pooled * C
    sum_d = _total(partial, 0, programs, f, C, 2, ROWS)
    sum_dx = _total(partial, 1, programs, f, C, 2, ROWS)
    if tl.program_id(0) == 0:
        tl.store(d_bias + known, sum_d)
        tl.store(d_gain + known, sum_dx)
    mean_d, mean_dx = (sum_d / pixels)[None, :], (sum_dx / pixels)[None, :]
    centre, factor = tl.load(mean + known)[None, :], tl.load(r + known)[None, :]
    scale = tl.load(gain + task * gain_apart + f).to(SUM)[None, :] * factor
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        won, _, d = _winners(dy, code, at, valid, f, C, SLOPE, SUM)
        for s in tl.static_range(4):
            pixel, inside = _corner(at, valid, s, H, W, HP, WP)
            place = pixel[:, None] * C + f[None, :]
            normal = (tl.load(x + place, mask=inside, other=0).to(SUM) - centre) * factor
            here = scale * (tl.where(won == s, d, 0.0) - mean_d - normal * mean_dx)
            tl.store(dx + place, here.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _second_sums_kernel(
    v, dy, x, code, mean, r, partial, pixels, pooled, H, W, HP, WP, SLOPE: tl.constexpr, C: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of v, v x^ and v d."""
    task, f, known = _channels(C, CHANNELS)
    SUM: tl.constexpr = partial.dtype.element_ty
    v, x = v + task * pixels * C, x + task * pixels * C
    dy, code = dy + task * pooled * C, code + task * pooled * C
    centre, factor = tl.load(mean + known)[None, :], tl.load(r + known)[None, :]
    sums = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    by_normal = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    by_d = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        won, _, d = _winners(dy, code, at, valid, f, C, SLOPE, SUM)
        for s in tl.static_range(4):
            pixel, inside = _corner(at, valid, s, H, W, HP, WP)
            place = pixel[:, None] * C + f[None, :]
            here = tl.load(v + place, mask=inside, other=0).to(SUM)
            sums += here
            by_normal += here * (tl.load(x + place, mask=inside, other=0).to(SUM) - centre) * factor
            by_d += tl.where(won == s, here * d, 0.0)
    _keep(partial, 0, sums, C, f, 3)
    _keep(partial, 1, by_normal, C, f, 3)
    _keep(partial, 2, by_d, C, f, 3)


@triton.jit(do_not_specialize=SIZES)
def _second_kernel(
    v, v_gain, v_bias, dy, x, code, gain, mean, r, d_gain, d_bias, partial, at_dy, at_x, at_gain, pixels, pooled,
    programs, v_gain_apart, v_bias_apart, gain_apart, H, W, HP, WP, SLOPE: tl.constexpr, C: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients at dy, x and gain from those at dx, dg and db."""
    task, f, known = _channels(C, CHANNELS)
    SUM: tl.constexpr = partial.dtype.element_ty
    v, x, at_x = v + task * pixels * C, x + task * pixels * C, at_x + task * pixels * C
    dy, code, at_dy = dy + task * pooled * C, code + task * pooled * C, at_dy + task * pooled * C
    mean_v = _total(partial, 0, programs, f, C, 3, ROWS) / pixels
    mean_vx = _total(partial, 1, programs, f, C, 3, ROWS) / pixels
    mean_vd = _total(partial, 2, programs, f, C, 3, ROWS) / pixels
    mean_d, mean_dx = tl.load(d_bias + known).to(SUM) / pixels, tl.load(d_gain + known).to(SUM) / pixels
    mean_v_p_d = mean_vd - mean_v * mean_d - mean_vx * mean_dx
    centre, factor = tl.load(mean + known), tl.load(r + known)
    if tl.program_id(0) == 0:
        tl.store(at_gain + known, factor * mean_v_p_d * pixels)
    scale = tl.load(gain + task * gain_apart + f).to(SUM) * factor
    by_gain = tl.load(v_gain + task * v_gain_apart + f).to(SUM)
    by_bias = tl.load(v_bias + task * v_bias_apart + f).to(SUM)
    of_p_d, of_p_v, of_normal = (
        (by_gain - scale * mean_vx) * factor,
        scale * mean_dx * factor,
        scale * factor * mean_v_p_d,
    )
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        won, scaled, d = _winners(dy, code, at, valid, f, C, SLOPE, SUM)
        best = tl.zeros((BLOCK, CHANNELS), dtype=SUM)
        for s in tl.static_range(4):
            pixel, inside = _corner(at, valid, s, H, W, HP, WP)
            place = pixel[:, None] * C + f[None, :]
            normal = (tl.load(x + place, mask=inside, other=0).to(SUM) - centre[None, :]) * factor[None, :]
            p_v = tl.load(v + place, mask=inside, other=0).to(SUM) - mean_v[None, :] - normal * mean_vx[None, :]
            p_d = tl.where(won == s, d, 0.0) - mean_d[None, :] - normal * mean_dx[None, :]
            here = of_p_d[None, :] * p_d - of_p_v[None, :] * p_v - of_normal[None, :] * normal
            tl.store(at_x + place, here.to(at_x.dtype.element_ty), mask=inside)
            best = tl.where(won == s, scale[None, :] * p_v + by_gain[None, :] * normal + by_bias[None, :], best)
        tl.store(at_dy + at[:, None] * C + f[None, :], (scaled * best).to(at_dy.dtype.element_ty), mask=valid[:, None])


class _Sizes(NamedTuple):
    """Of a task: pixels, squares of four of them, height and width in pixels and in squares; how many there are, and
    how many channels of how many at once."""

    pixels: int
    pooled: int
    image: tuple[int, int, int, int]
    tasks: int
    channels: int
    at_once: int

    def options(self, kernel: str) -> dict[str, int]:
        numbers, warps = LAUNCH[kernel]
        return {"C": self.channels, "CHANNELS": self.at_once, "BLOCK": numbers // self.at_once, "num_warps": warps}

    def grid(self, kernel: str) -> tuple[int, int, int]:
        groups, blocks = self.channels // self.at_once, triton.cdiv(self.pooled, self.options(kernel)["BLOCK"])
        if "sums" in kernel:
            blocks = min(SUMS, triton.cdiv(blocks, AT_LEAST))
        return max(1, min(blocks, FULL // (self.tasks * groups))), self.tasks, groups


def _sizes(x: Tensor) -> _Sizes:
    tasks, count, height, width, channels = x.shape
    tall, wide = (height + 1) // 2, (width + 1) // 2
    image = height, width, tall, wide
    return _Sizes(count * height * width, count * tall * wide, image, tasks, channels, channels_at_once(channels))


def _of_channels(x: Tensor, *leading: int) -> Tensor:
    """Room for sums, or numbers, of each task and channel."""
    shape = (len(x), *leading, x.shape[4])
    return torch.empty(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _dense(numbers: Tensor) -> tuple[Tensor, int]:
    """Numbers (T, C) with the channels side by side, and how far apart tasks are."""
    numbers = numbers if numbers.stride(1) == 1 else numbers.contiguous()
    return numbers, numbers.stride(0)


class _Normalised(per_task.ByTask):
    """x (T, n, H, W, C), gain and bias (T, C) -> y (T, n, HP, WP, C), its code, mean and r (T, C)."""

    @staticmethod
    def forward(
        x: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, s = x.contiguous(), _sizes(x)
        (gain, gain_apart), (bias, bias_apart) = _dense(gain), _dense(bias)
        grid = s.grid("sums")
        partial = _of_channels(x, grid[0], 2)
        _sums_kernel[grid](x, partial, s.pixels, **s.options("sums"))
        y = x.new_empty(*x.shape[:2], *s.image[2:], x.shape[4])
        code, mean, r = torch.empty_like(y, dtype=torch.int8), _of_channels(x), _of_channels(x)
        _value_kernel[s.grid("value")](
            x, partial, gain, bias, y, code, mean, r, s.pixels, s.pooled, grid[0], gain_apart, bias_apart, *s.image,
            EPS=eps, SLOPE=slope, ROWS=ROWS, **s.options("value"),
        )  # fmt: skip
        return y, code, mean, r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gain, _, _, ctx.slope = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *output[1:2], gain, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return (None,) * 5
        return *_Gradients.apply(grads[0], *ctx.saved_tensors, ctx.slope), None, None


class _Gradients(per_task.ByTask):
    """dy, x, code, gain, mean and r -> dx, dg and db."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, code: Tensor, gain: Tensor, mean: Tensor, r: Tensor, slope: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy, x, s = dy.contiguous(), x.contiguous(), _sizes(x)
        gain, gain_apart = _dense(gain)
        grid = s.grid("gradient_sums")
        partial = _of_channels(x, grid[0], 2)
        _gradient_sums_kernel[grid](
            dy, x, code, mean, r, partial, s.pixels, s.pooled, *s.image, SLOPE=slope, **s.options("gradient_sums")
        )
        dx, d_gain, d_bias = torch.empty_like(x), _of_channels(x), _of_channels(x)
        _gradient_kernel[s.grid("gradient")](
            dy, x, code, gain, mean, r, partial, dx, d_gain, d_bias, s.pixels, s.pooled, grid[0], gain_apart,
            *s.image, SLOPE=slope, ROWS=ROWS, **s.options("gradient"),
        )  # fmt: skip
        return dx, d_gain, d_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.slope = inputs
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        at_dy, at_x, at_gain = _SecondGradients.apply(*grads, *ctx.saved_tensors, ctx.slope)
        return at_dy, at_x, None, at_gain, None, None, None


class _SecondGradients(per_task.ByTask):
    """v, v_g and v_b at dx, dg and db, the inputs of these, dg and db -> gradients at dy, x and gain."""

    @staticmethod
    def forward(
        v: Tensor, v_gain: Tensor, v_bias: Tensor, dy: Tensor, x: Tensor, code: Tensor, gain: Tensor, mean: Tensor,
        r: Tensor, d_gain: Tensor, d_bias: Tensor, slope: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        v, dy, x, s = v.contiguous(), dy.contiguous(), x.contiguous(), _sizes(x)
        (v_gain, v_gain_apart), (v_bias, v_bias_apart), (gain, gain_apart) = map(_dense, (v_gain, v_bias, gain))
        grid = s.grid("second_sums")
        partial = _of_channels(x, grid[0], 3)
        _second_sums_kernel[grid](
            v, dy, x, code, mean, r, partial, s.pixels, s.pooled, *s.image, SLOPE=slope, **s.options("second_sums")
        )
        at_dy, at_x, at_gain = torch.empty_like(dy), torch.empty_like(x), _of_channels(x)
        _second_kernel[s.grid("second")](
            v, v_gain, v_bias, dy, x, code, gain, mean, r, d_gain, d_bias, partial, at_dy, at_x, at_gain, s.pixels,
            s.pooled, grid[0], v_gain_apart, v_bias_apart, gain_apart, *s.image, SLOPE=slope, ROWS=ROWS,
            **s.options("second"),
        )  # fmt: skip
        return at_dy, at_x, at_gain

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("batch norm by batch statistics can be differentiated twice only")


def fits(x: Tensor) -> bool:
    """Whether the kernels compute this: x (n, C, H, W)."""
    return per_task.has_kernels(x) and x.shape[1] % LEAST_CHANNELS == 0


def normalise_and_pool(x: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """`leaky_relu(max_pool2d(batch_norm(x)))` of x (n, C, H, W), quickest with channels innermost in memory."""
    of_one_task = (each.unsqueeze(0) for each in (x.permute(0, 2, 3, 1), gain, bias))
    return _Normalised.apply(*of_one_task, eps, slope)[0].squeeze(0).permute(0, 3, 1, 2)
