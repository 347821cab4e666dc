"""Batch norm by the statistics of the batch itself, of each task's own under `vmap`: right when differentiated twice.

Under `vmap`, torch's own batch norm gives silently wrong second derivatives, and elementary operations take more than a
hundred kernels for them. Here value and derivatives are torch's kernels, with the channels of all tasks side by side,
and the derivatives of the derivatives are written out. With x^ = (x - mean) r, r = 1 / sqrt(variance + eps), and means
<...> over the n pixels of a channel:

    y = g x^ + b,    dx = g r P dy,    dg = n <dy x^>,    db = n <dy>    where P z = z - <z> - x^ <z x^>

P is its own transpose. So with v, v_g and v_b at dx, dg and db the derivatives of these are

    at dy   g r P v + v_g x^ + v_b
    at g    r n <v P dy>
    at x    (v_g - g r <v x^>) r P dy - g r <dy x^> r P v - g r^2 <v P dy> x^

Statistics and sums are in float32 or better. A third derivative is refused.
"""

from typing import Any

import torch
from torch import Tensor

Dims = tuple[int | None, ...]


def normalise_by_batch(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Batch norm of x (n, C, H, W) with gains and biases (C) by the statistics of x."""
    return _Normalised.apply(x, gain, bias, eps)[0]


class _ByChannel(torch.autograd.Function):
    """A function of tensors (n, C, H, W) and (C), each channel by itself: tasks of `vmap` are further channels."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        tasks = info.batch_size
        merged = [_merged(x, at, tasks) if isinstance(x, Tensor) else x for x, at in zip(inputs, in_dims, strict=True)]
        outputs = cls.apply(*merged)
        at = tuple(1 if y.dim() == 4 else 0 for y in outputs)
        return tuple(y.unflatten(place, (tasks, -1)) for y, place in zip(outputs, at, strict=True)), at


def _merged(x: Tensor, at: int | None, tasks: int) -> Tensor:
    """(n, C, H, W) or (C), with tasks in dimension `at` or the same for all, as (n, T C, H, W) or (T C)."""
    channel = 1 if x.dim() - (at is not None) == 4 else 0
    if at is None:
        x, at = x.expand(tasks, *x.shape), 0
    return x.movedim(at, channel).flatten(channel, channel + 1)


class _Normalised(_ByChannel):
    """x (n, C, H, W), gain and bias (C) -> y like x, mean and r (C)."""

    @staticmethod
    def forward(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_batch_norm(x, gain, bias, None, None, True, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, gain, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gain, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 4 if grads[0] is None else (*_Gradients.apply(grads[0], *ctx.saved_tensors), None)


class _Gradients(_ByChannel):
    """dy, x (n, C, H, W), gain, mean and r (C) -> dx, dg and db."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, gain: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _gradients(dy, x, gain, mean, r)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *_SecondGradients.apply(*grads, *ctx.saved_tensors), None, None


class _SecondGradients(_ByChannel):
    """v, v_g and v_b at dx, dg and db, and the inputs of these -> gradients at dy, x and gain."""

    @staticmethod
    def forward(
        v: Tensor, v_gain: Tensor, v_bias: Tensor, dy: Tensor, x: Tensor, gain: Tensor, mean: Tensor, r: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        share = x.shape[1] / x.numel()
        ones = torch.ones_like(gain)
        r_p_v, v_x, _ = _gradients(v, x, ones, mean, r)
        r_p_dy, dy_x, _ = _gradients(dy, x, ones, mean, r)
        at_gain = torch.mul(v, r_p_dy).sum((0, 2, 3), dtype=r.dtype)
        scale = gain * r * -share
        c, centred = _of_channels, (x - _of_channels(mean)) * _of_channels(r)
        at_dy = torch.addcmul(torch.addcmul(c(v_bias), centred, c(v_gain)), r_p_v, c(gain))
        at_x = r_p_dy * c(torch.addcmul(v_gain, scale, v_x))
        at_x = torch.addcmul(torch.addcmul(at_x, r_p_v, c(scale * dy_x)), centred, c(scale * at_gain))
        return at_dy.to(dy.dtype), at_x.to(x.dtype), at_gain

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("batch norm by batch statistics can be differentiated twice only")


def _gradients(dy: Tensor, x: Tensor, gain: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dg and db by torch's kernel, which asks for an eps that it does not need."""
    backward, eps = torch.ops.aten.native_batch_norm_backward, 0.0
    return backward(dy.to(x.dtype), x, gain, None, None, mean, r, True, eps, [True, True, True])


def _of_channels(numbers: Tensor) -> Tensor:
    return numbers.view(-1, 1, 1)
