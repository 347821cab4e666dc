"""Triton kernels of a 3x3 convolution with filters of each task's own; `per_task` describes its derivatives.

Activations are (T, n, H, W, D), filters (T, 3, 3, D, F): tasks are a dimension of the launch grid. A convolution is
nine products of matrices, one for each tap of the filters. Images of a few channels are an exception: all that lies
under the nine taps is one row of a single product. Filters stay in float32 and are rounded to the activations' format
as they are loaded, so nothing is cast beforehand; tasks may lie any stride apart, as in slices of one long vector, or
share their filters (a stride of 0). Sums are in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"conv": (128, 4, 3), "conv_float32": (32, 4, 2), "filter_grad": (64, 4, 3)}
"""Pixels per block, warps and pipeline stages of each kernel. Products of float32 take many more registers."""
SMALLEST, FULL = 32, 2 * 132
"""Blocks of a convolution are halved, down to the smallest, until there are enough of them to fill the largest GPUs."""
AT_LEAST = 16
"""Blocks that a program of the filters' gradient sums up, if there are so many: partial sums are large."""
FEW_CHANNELS = 3
"""Up to this many channels, the nine taps are one product."""
CHANNELS = (16, 32, 64)
"""Otherwise a product needs one of these numbers, as rows and columns: a tile of filters fits the fast memories."""
SIZES = ["pixels", "H", "W"]
"""Sizes that kernels are not specialised for."""


@triton.jit
def _patches(x, at, row, column, inside, tap, H, W, D: tl.constexpr, K: tl.constexpr):
    """What lies under a tap around the pixels `at`, D = K channels; of few channels, what lies under all nine taps."""
    k = tl.arange(0, K)
    if D < K:
        taps, used = (k // D)[None, :], (k < 9 * D)[None, :]
    else:
        taps, used = tl.zeros((1, K), dtype=tl.int32) + tap, (k < K)[None, :]
    down, right = taps // 3 - 1, taps % 3 - 1
    y, z = row[:, None] + down, column[:, None] + right
    there = inside[:, None] & used & (y >= 0) & (y < H) & (z >= 0) & (z < W)
    place = (at[:, None] + down * W + right) * D + (k % D)[None, :]
    return tl.load(x + place, mask=there, other=0)


@triton.jit
def _filters(filters, tap, D: tl.constexpr, K: tl.constexpr, F: tl.constexpr, MIRRORED: tl.constexpr):
    """The matrix (K, F) of a tap, or of all nine; of mirrored filters (9, F, D), that of the tap across, transposed."""
    k, f = tl.arange(0, K), tl.arange(0, F)
    if MIRRORED:
        matrix = tl.trans(tl.load(filters + ((8 - tap) * F + f[:, None]) * D + k[None, :]))
    elif D < K:
        matrix = tl.load(filters + k[:, None] * F + f[None, :], mask=(k < 9 * D)[:, None], other=0)
    else:
        matrix = tl.load(filters + (tap * D + k[:, None]) * F + f[None, :])
    return matrix


@triton.jit(do_not_specialize=SIZES)
def _conv_kernel(
    x, filters, out, pixels, apart, H, W, D: tl.constexpr, K: tl.constexpr, F: tl.constexpr, TAPS: tl.constexpr,
    MIRRORED: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    x, filters, out = x + task * pixels * D, filters + task * apart, out + task * pixels * F
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column, inside = at % (H * W) // W, at % W, at < pixels  # divisions are dear: once, not for each tap
    total = tl.zeros((BLOCK, F), dtype=SUM)
    for tap in range(TAPS):
        a = _patches(x, at, row, column, inside, tap, H, W, D, K).to(out.dtype.element_ty)
        w = _filters(filters, tap, D, K, F, MIRRORED).to(out.dtype.element_ty)
        total = tl.dot(a, w, total, input_precision="ieee", out_dtype=SUM)
    to = out + at[:, None] * F + tl.arange(0, F)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=SIZES)
def _filter_grad_kernel(
    x, grad, out, pixels, H, W, D: tl.constexpr, K: tl.constexpr, F: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program's share of the pixels' sum, for one tap or for all nine of few channels: out (programs, T, 9, D, F)."""
    tap, task = tl.program_id(1), tl.program_id(2).to(tl.int64)
    x, grad = x + task * pixels * D, grad + task * pixels * F
    k, f = tl.arange(0, K), tl.arange(0, F)
    total = tl.zeros((K, F), dtype=SUM)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pixels
        g = tl.load(grad + at[:, None] * F + f[None, :], mask=inside[:, None], other=0)
        a = _patches(x, at, at % (H * W) // W, at % W, inside, tap, H, W, D, K).to(g.dtype)
        total = tl.dot(tl.trans(a), g, total, input_precision="ieee", out_dtype=SUM)
    row = tl.program_id(1) * K + k
    to = out + ((tl.program_id(0) * tl.num_programs(2) + task) * 9 * D + row)[:, None] * F + f[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < 9 * D)[:, None])


def fits(channels: int, filters: int, *, mirrored: bool = False) -> bool:
    """Whether the kernels compute such convolutions."""
    few = channels <= FEW_CHANNELS and not mirrored
    return (few or channels in CHANNELS) and filters in CHANNELS


def convolution(x: Tensor, filters: Tensor, dtype: torch.dtype, *, mirrored: bool) -> Tensor:
    """x (T, n, H, W, D) by filters (T, 3, 3, D, F), or by the mirror image of filters (T, 3, 3, F, D)."""
    tasks, count, height, width, channels = x.shape
    width_out, pixels = filters.shape[3 if mirrored else 4], count * height * width
    out = torch.empty(tasks, count, height, width, width_out, dtype=dtype, device=x.device)
    block, warps, stages = LAUNCH["conv" if dtype == torch.bfloat16 else "conv_float32"]
    while block > SMALLEST and tasks * triton.cdiv(pixels, block) < FULL:
        block //= 2
    filters = _each_dense(filters)
    _conv_kernel[(triton.cdiv(pixels, block), tasks)](
        x.contiguous(), filters, out, pixels, filters.stride(0), height, width, D=channels, K=_rows(channels),
        F=width_out, TAPS=_taps(channels), MIRRORED=mirrored, SUM=_sum_type(dtype), BLOCK=block, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out


def filter_gradient(x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """x (T, n, H, W, D), gradient at a convolution's output (T, n, H, W, F) -> that at its filters (T, 3, 3, D, F)."""
    (tasks, count, height, width, channels), filters = x.shape, grad.shape[4]
    pixels, taps = count * height * width, _taps(channels)
    block, warps, stages = LAUNCH["filter_grad"]
    programs = max(1, min(triton.cdiv(pixels, AT_LEAST * block), 4 * FULL // (tasks * taps)))
    shape, sums = (programs, tasks, 3, 3, channels, filters), torch.promote_types(grad.dtype, torch.float32)
    out = torch.empty(shape, dtype=sums if programs > 1 else dtype, device=x.device)
    _filter_grad_kernel[(programs, taps, tasks)](
        x.contiguous(), grad.contiguous(), out, pixels, height, width, D=channels, K=_rows(channels), F=filters,
        SUM=_sum_type(grad.dtype), BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out[0] if programs == 1 else out.sum(0, dtype=dtype)


def _rows(channels: int) -> int:
    """Rows of the filters' matrix that a product takes."""
    return max(16, triton.next_power_of_2(9 * channels)) if channels <= FEW_CHANNELS else channels


def _taps(channels: int) -> int:
    return 1 if channels <= FEW_CHANNELS else 9


def _each_dense(filters: Tensor) -> Tensor:
    """The filters of each task without gaps, however far apart tasks are."""
    return filters if filters[0].is_contiguous() else filters.contiguous()


def _sum_type(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
