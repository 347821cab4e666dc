"""The CNN's layers on a GPU, fused: convolution, batch norm, 2x2 max-pooling and leaky ReLU, forward and backward.

A layer is y = leaky_relu(max_pool(batch_norm(conv3x3(x)))), as in `nn.encoders.CNN`, the reference that tests compare
values and gradients with. Fusing saves memory traffic, which bounds such small convolutions:

- **First layer.** Its input (bytes) is far smaller than its output (32 or 64 numbers per pixel), so the output is never
  written: the forward pass convolves, normalises and pools at once. Nor do batch norm's statistics need a pass over the
  output. With p the patch under a filter w, the output is w.p, its mean w.E[p] and its variance w'Cov[p]w: the second
  moments of the patches (28 x 28 numbers) are enough. In the backward pass they give every sum over pixels but one,
  G = sum d p'; d is zero except where the pooling picked its maximum.
- **Further layers.** The convolution sums its output's statistics on the way; normalising, pooling and activating are
  one pass forward, and two (sums, then the gradient) backward.
- **Inference.** Statistics are constants: each layer is a single pass that writes only the pooled output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.kernels import cnn


def _statistics(ctx: Any, mean: Tensor, variance: Tensor, pixels: int, slope: float) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, as running statistics use them."""
    ctx.slope = slope
    mean, variance = mean.float(), (variance * pixels / (pixels - 1)).float()
    ctx.mark_non_differentiable(mean, variance)
    return mean, variance


class FirstLayer(torch.autograd.Function):
    """images (B, H, W, C) uint8, weight (F, C, 3, 3), batch norm's gain, bias -> pooled (B, HP, WP, F), mean, var."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float) -> Any:
        pixels, matrix = images.shape[0] * images.shape[1] * images.shape[2], cnn.filter_matrix(weight)
        first, second = cnn.patch_moments(images, matrix)
        exact = matrix.double()
        mean = exact.T @ first
        variance = ((exact.T @ (second - first.outer(first))) * exact.T).sum(-1).clamp_min(0)
        deviation = (variance + eps).sqrt()
        scale = gain.double() / deviation
        out, winner = cnn.first_forward(images, matrix, scale, bias.double() - scale * mean, slope, train=True)
        ctx.save_for_backward(images, out, winner, matrix, gain, first, second, mean, deviation)
        return out, *_statistics(ctx, mean, variance, pixels, slope)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        images, out, winner, matrix, gain, first, second, mean, deviation = ctx.saved_tensors
        channels = images.shape[3]
        moments = cnn.first_backward(images, out, winner, grads[0].contiguous(), matrix, ctx.slope).double()
        d_patch, d_sum = moments[:, : 9 * channels] / 255, moments[:, 9 * channels]
        exact = matrix[: 9 * channels].double()
        d_z = (d_patch * exact.T).sum(-1)
        d_normal = (d_z - mean * d_sum) / deviation
        # Sums over all pixels of the gradient at the convolution's output times the patch, from the moments.
        patches = first[: 9 * channels]
        normal_patch = (exact.T @ second[: 9 * channels, : 9 * channels] - mean.outer(patches)) / deviation.unsqueeze(1)
        d_weight = d_patch - d_sum.outer(patches) - d_normal.unsqueeze(1) * normal_patch
        d_weight = (gain.double() / deviation).unsqueeze(1) * d_weight
        d_weight = d_weight.view(-1, 3, 3, channels).permute(0, 3, 1, 2).float()
        return None, d_weight, d_normal.float(), d_sum.float(), None, None


class FurtherLayer(torch.autograd.Function):
    """x (B, H, W, D), weight (F, D, 3, 3), batch norm's gain and bias -> pooled (B, HP, WP, F), mean, var."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float) -> Any:
        z, sums = cnn.conv_with_sums(x, weight)
        pixels = z.shape[0] * z.shape[1] * z.shape[2]
        mean, square = (sums / pixels).unbind(0)
        variance = (square - mean * mean).clamp_min(0)
        deviation = (variance + eps).sqrt()
        scale = gain.double() / deviation
        shift = bias.double() - scale * mean
        scale, shift = scale.float(), shift.float()
        out = cnn.pool_forward(z, scale, shift, slope)
        ctx.save_for_backward(x, weight, z, scale, shift, mean, deviation)
        return out, *_statistics(ctx, mean, variance, pixels, slope)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, z, scale, shift, mean, deviation = ctx.saved_tensors
        pixels = z.shape[0] * z.shape[1] * z.shape[2]
        grad = grads[0].contiguous()
        d_sum, d_z = cnn.pool_sums(z, scale, shift, grad, ctx.slope).unbind(0)
        d_normal = (d_z - mean * d_sum) / deviation
        # dz = scale (d - mean d - normal * mean(d normal)), with normal = (z - mean) / deviation
        c1 = scale * d_normal / (pixels * deviation)
        c0 = scale * d_sum / pixels - c1 * mean
        dz = cnn.pool_grad(z, scale, shift, grad, c0.float(), c1.float(), ctx.slope)
        d_x, d_weight = conv_backward(dz, x, weight)
        return d_x, d_weight, d_normal.float(), d_sum.float(), None, None


def conv_backward(dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a 3x3 convolution with respect to its input and its filters, by the vendor's library."""
    chw = (0, 3, 1, 2)
    filters = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        dz.permute(chw), x.permute(chw), filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return d_x.permute(0, 2, 3, 1), d_weight.to(weight.dtype)


def run_cnn(images: Tensor, convolutions: Sequence[nn.Conv2d], norms: Sequence[nn.BatchNorm2d], slope: float) -> Tensor:
    """`nn.encoders.CNN` in bfloat16, running statistics included: (B, H, W, C) uint8 -> (B, F, HP, WP)."""
    x = images
    for i, (convolution, norm) in enumerate(zip(convolutions, norms, strict=True)):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        if norm.training:
            layer = FirstLayer if i == 0 else FurtherLayer
            x, mean, variance = layer.apply(x, convolution.weight, norm.weight, norm.bias, norm.eps, slope)
            assert norm.num_batches_tracked is not None
            with torch.no_grad():
                norm.num_batches_tracked += 1
                norm.running_mean.lerp_(mean, norm.momentum or 0.0)
                norm.running_var.lerp_(variance, norm.momentum or 0.0)
        else:
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            shift = norm.bias - scale * norm.running_mean
            if i == 0:
                x, _ = cnn.first_forward(x, cnn.filter_matrix(convolution.weight), scale, shift, slope, train=False)
            else:
                x = cnn.further_layer_inference(x, convolution.weight, scale, shift, slope)
    return x.permute(0, 3, 1, 2)
