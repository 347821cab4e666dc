"""Products of float32 matrices inside other kernels, on tensor cores and nearly as exact as without them."""

import triton
import triton.language as tl

PRECISION = "tf32x3"
"""How `dot` multiplies float32 on a GPU: three products on tensor cores, nearly as exact as "ieee", without them."""


@triton.jit
def _parts(x):
    """x as a sum of two numbers, the first as tensor cores hold it: 10 bits behind the point, rounded to nearest."""
    large = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """The product of two matrices. Triton's own "tf32x3" splits b in a layout that needs more registers than exist."""
    if PRECISION == "tf32x3":
        a_large, a_small = _parts(a)
        b_large, b_small = _parts(b)
        product = tl.dot(a_small, b_large, input_precision="tf32")
        product = tl.dot(a_large, b_small, product, input_precision="tf32")
        return tl.dot(a_large, b_large, product, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision=PRECISION)
