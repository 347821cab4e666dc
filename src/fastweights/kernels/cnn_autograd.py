"""The CNN's layers on a GPU, fused: convolution, batch norm, 2x2 max-pooling and leaky ReLU, forward and backward.

A layer is y = leaky_relu(max_pool(batch_norm(conv3x3(x)))), as in `nn.encoders.CNN`, the reference that tests compare
values and gradients with. Fusing saves memory traffic, which bounds such small convolutions:

- **First layer:** see `first_layer`; what it convolves is never written.
- **Further layers.** The convolution sums its output's statistics on the way; normalising, pooling and activating are
  one pass forward, and two (sums, then the gradient) backward.
- **Inference.** Statistics are constants: each layer is a single pass that writes only the pooled output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.kernels import batch_norm, cnn
from fastweights.kernels.first_layer import first_layer
from fastweights.utils import differentiable


class FurtherLayer(torch.autograd.Function):
    """x (B, H, W, D), weight (F, D, 3, 3), batch norm's gain and bias -> pooled (B, HP, WP, F)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d, slope: float
    ) -> Tensor:
        z, sums = cnn.conv_with_sums(x, weight)
        known = batch_norm.statistics(sums, z.numel() // z.shape[-1], gain, bias, norm)
        ctx.save_for_backward(x, weight, z, known)
        ctx.slope = slope
        return cnn.pool_forward(z, known[2], known[3], slope)

    @staticmethod
    @differentiable.once("the fused layers of the CNN can be differentiated once only")
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, z, known = ctx.saved_tensors
        grad, scale, shift = grads[0].contiguous(), known[2], known[3]
        sums = cnn.pool_sums(z, scale, shift, grad, ctx.slope)
        found = batch_norm.gradients(sums, z.numel() // z.shape[-1], known)
        dz = cnn.pool_grad(z, scale, shift, grad, found[2], found[3], ctx.slope)
        return *conv_backward(dz, x, weight), found[1], found[0], None, None


def conv_backward(dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a 3x3 convolution with respect to its input and its filters; of few filters by a kernel of ours."""
    chw, ours = (0, 3, 1, 2), len(weight) <= cnn.WINDOW_FILTERS
    filters = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
    wanted = [True, not ours, False]
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        dz.permute(chw), x.permute(chw), filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
    )
    return d_x.permute(0, 2, 3, 1), cnn.weight_grad(dz, x) if ours else d_weight.to(weight.dtype)


def run_cnn(images: Tensor, convolutions: Sequence[nn.Conv2d], norms: Sequence[nn.BatchNorm2d], slope: float) -> Tensor:
    """`nn.encoders.CNN` in bfloat16, running statistics included: (B, H, W, C) uint8 -> (B, F, HP, WP)."""
    x = first_layer(images, convolutions[0].weight, norms[0], slope, pool=True)
    for convolution, norm in zip(convolutions[1:], norms[1:], strict=True):
        if norm.training:
            x = FurtherLayer.apply(x, convolution.weight, norm.weight, norm.bias, norm, slope)
        else:
            x = cnn.further_layer_inference(x, convolution.weight, *batch_norm.constants(norm), slope)
    return x.permute(0, 3, 1, 2)
