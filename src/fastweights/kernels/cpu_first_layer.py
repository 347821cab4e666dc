"""The CNN's first layer in training on a CPU: convolution, batch norm, 2x2 max-pooling and leaky ReLU.

The layer is y = leaky_relu(max_pool(batch_norm(conv3x3(x)))), `plain_layer`, the reference that tests compare with.
Images have few channels and nobody asks for their gradient, so two passes over the largest tensors can be saved:

- The mean and variance of the convolution z = w * x follow from the sums and products of the 3x3 patches of x, a matrix
  of 9C x 9C. So does all of the filters' gradient but what reaches them by the maxima.
- Batch norm is increasing, or decreasing where its gain is negative. With the filters' sign turned there, it may follow
  the pooling, on a quarter of the numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.cpu import pieces

MOST_CHANNELS = 4
"""Of images; with more, the products of patches cost more than they save."""


def plain_layer(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """The layer by PyTorch's own operations: (B, C, H, W) -> (B, F, HP, WP)."""
    z = F.batch_norm(F.conv2d(x, weight, padding=1), None, None, gain, bias, training=True, eps=eps)
    return F.leaky_relu(F.max_pool2d(z, 2, ceil_mode=True), slope)


def first_layer(x: Tensor, weight: Tensor, norm: nn.BatchNorm2d, slope: float) -> Tensor:
    """Images (B, C, H, W) of floats, channels innermost in memory -> (B, F, HP, WP); updates running statistics."""
    return FirstLayer.apply(x, weight, norm.weight, norm.bias, norm, slope)


def patch_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (9C) and products (9C, 9C) of all 3x3 patches of images padded with zeros, in float64."""
    images, channels, height, width = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    # A patch begins at every pixel of the padded images, laid end to end; those that would cross a border are zeroed.
    begins = torch.zeros(padded.shape[:3])
    begins[:, :height, :width] = 1
    row = channels * (width + 2)
    all_images = F.pad(padded.flatten(), (0, 2 * row + 2 * channels))
    views = all_images.as_strided((3, 3, channels, begins.numel()), (row, channels, 1, channels))
    patches = torch.empty(views.shape)  # in this order in memory
    torch.mul(views, begins.flatten(), out=patches)
    by_image = patches.view(9 * channels, images, -1).transpose(0, 1)
    return by_image.sum(2).double().sum(0), (by_image @ by_image.mT).double().sum(0)


class Known(NamedTuple):
    """What batch norm knows of its input z: it computes scale * z + shift; each (F)."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor

    def normalise(self, z: Tensor) -> Tensor:
        return torch.addcmul(self.shift.view(-1, 1, 1), z, self.scale.view(-1, 1, 1))


def statistics(mean: Tensor, variance: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Known:
    """From mean and variance in float64."""
    rstd = (variance + eps).rsqrt()
    scale = gain * rstd
    return Known(mean.float(), rstd.float(), scale.float(), (bias - scale * mean).float())


def update_running(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, count: int) -> None:
    """As batch norm does: the running variance is that of all numbers, of which these are a sample."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.float(), norm.momentum)
    norm.running_var.lerp_((variance * (count / max(count - 1, 1))).float(), norm.momentum)


class FirstLayer(torch.autograd.Function):
    """x (B, C, H, W), weight (F, C, 3, 3), batch norm's gain and bias -> pooled (B, F, HP, WP)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d, slope: float
    ) -> Tensor:
        sign = torch.where(gain < 0, -1.0, 1.0)
        filters = (weight * sign.view(-1, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
        moments, pooled, places = [], [], []
        for piece in pieces(len(x), len(weight) * x.shape[2] * x.shape[3]):
            moments.append(patch_sums(x[piece]))
            z = F.conv2d(x[piece], filters, padding=1)
            values, where = F.max_pool2d(z, 2, ceil_mode=True, return_indices=True)
            pooled.append(values)
            places.append(where)
        sums, products = (torch.stack(each).sum(0) for each in zip(*moments, strict=True))
        columns, count = columns_of(filters), x.numel() // x.shape[1]
        mean = sums @ columns / count
        variance = ((columns * (products @ columns)).sum(0) / count - mean.square()).clamp(min=0)
        update_running(norm, mean * sign, variance, count)
        known, best = statistics(mean, variance, gain.abs(), bias, norm.eps), torch.cat(pooled)
        ctx.save_for_backward(x, weight, gain, bias, filters, sign, best, sums, products, *known)
        ctx.places, ctx.eps, ctx.slope = places, norm.eps, slope
        return F.leaky_relu_(known.normalise(best), slope)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, gain, bias, filters, sign, best, sums, products, *known = ctx.saved_tensors
        known = Known(*known)
        if torch.is_grad_enabled():  # somebody differentiates twice
            y = plain_layer(x, weight, gain, bias, ctx.eps, ctx.slope)
            found = torch.autograd.grad(y, (weight, gain, bias), grads[0], create_graph=True)
            return None, *found, None, None
        grad = torch.ops.aten.leaky_relu_backward(grads[0], known.normalise(best), ctx.slope, False)
        of_bias, product = (numbers.sum((0, 2, 3)).double() for numbers in (grad, grad * best))
        of_gain = known.rstd * (product - known.mean * of_bias)
        by_maxima = gradient_by_maxima(grad, x, filters, ctx.places)
        # Batch norm subtracts means, and so its gradient does.
        columns, count = columns_of(filters), x.numel() // x.shape[1]
        with_normalised = known.rstd * (products @ columns - sums.unsqueeze(1) * known.mean)
        by_means = (sums.unsqueeze(1) * of_bias + with_normalised * of_gain) / count
        of_columns = known.scale * sign * (columns_of(by_maxima) - by_means)
        of_weight = of_columns.view(3, 3, x.shape[1], len(weight)).permute(3, 2, 0, 1)
        return None, of_weight.float(), (of_gain * sign).float(), of_bias.float(), None, None


def columns_of(filters: Tensor) -> Tensor:
    """Filters (F, C, 3, 3) as columns (9C, F) in the order of `patch_sums`, in float64."""
    return filters.permute(2, 3, 1, 0).reshape(-1, len(filters)).double()


def gradient_by_maxima(grad: Tensor, x: Tensor, filters: Tensor, places: list[Tensor]) -> Tensor:
    """The filters' gradient from that at the maxima, which were at these places."""
    like = torch.empty(len(places[0]), len(filters), *x.shape[2:], memory_format=torch.channels_last)
    first, total, twos, ones, none = 0, torch.zeros_like(filters), [2, 2], [1, 1], [0, 0]
    for where in places:
        piece = slice(first, first := first + len(where))
        unpooled = torch.ops.aten.max_pool2d_with_indices_backward(
            grad[piece], like[: len(where)], twos, twos, none, ones, True, where
        )
        total += torch.ops.aten.convolution_backward(
            unpooled, x[piece], filters, None, ones, ones, ones, False, none, 1, [False, True, False]
        )[1]
    return total
