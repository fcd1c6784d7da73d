"""Exponentials for kernels, without what they cost where they are exact.

Triton writes tl.exp and a division out so that subnormal numbers come out right: some fifteen instructions an element
more. At the clock that is left beside GEMMs an elementwise kernel is as much arithmetic as bytes (docs/lab-notes.md),
and a subnormal probability or sigmoid is a zero to whoever reads it in bf16. So these flush subnormals. Elsewhere they
are good to some 3 units in the last place of float32, or to |x| · 2⁻²⁴ where that is more. In the interpreter, which
knows no PTX, they are the plain formulas. Triton would look their annotations up as globals of a kernel, so they have
none. Run: python -m pytest tests/lorakernels/test_fast_math.py
"""

from __future__ import annotations

from typing import Any

from ..runtime import INTERPRET, jit, tl

INTERPRETED = tl.constexpr(INTERPRET)
# The hexadecimal constants are log2 e, - log2 e, and 1. Any: in a kernel a constexpr is the string that it holds.
EXP_PTX: Any = tl.constexpr("mul.ftz.f32 $0, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, $0;")
SIGMOID_PTX: Any = tl.constexpr(
    "mul.ftz.f32 $0, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, $0; add.ftz.f32 $0, $0, 0f3F800000;"
    " rcp.approx.ftz.f32 $0, $0;"
)


@jit
def exp(x):
    """e^x of a float32 tile."""
    if INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise(EXP_PTX, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def sigmoid(x):
    """1 / (1 + e^-x) of a float32 tile. Declared impure, so that the compiler does not do it twice where a result is
    needed in two layouts, for a store and for a tl.dot."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.inline_asm_elementwise(SIGMOID_PTX, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@jit
def tanh(x):
    """tanh x of a float32 tile, through a sigmoid of 2x: the exponential of a large negative number is 0, never
    inf / inf."""
    return 2.0 * sigmoid(2.0 * x) - 1.0
