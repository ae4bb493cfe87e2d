"""What the kernels of norm, shift and mixes share: a program's tokens, their channels, their statistics.

Rows are cut into shares of ``span`` tokens. A program walks the tokens of one share, with ``BC``
channels of a token in its registers: all ``C`` of them (``WHOLE``), and then it sums over channels itself, or
one of several tiles of them (program axis 1), and then another kernel does.

Names with a ``_`` at their end are pointers. Constants say which arrays there are: ``NORM`` scale and bias,
``ADD`` y, ``LAST`` what a row's first token sees, ``SEG`` segments, ``MOVES``, ``H`` the normalised tokens as
a result, ``SUM`` a cotangent of x + y, ``KEEP`` statistics for the backward. The mixes stay in registers.
"""

import triton
import triton.language as tl

from ..common.sums import extended, sums


@triton.jit
def token_block(T, span):
    """The program's row, that row's first token in [B * T], its own first token, the one after its last."""
    count = tl.cdiv(T, span)
    row = (tl.program_id(0) // count).to(tl.int64)
    start = (tl.program_id(0) % count) * span
    return row, row * T, start, tl.minimum(start + span, T)


@triton.jit
def channels(BC: tl.constexpr):
    """The program's channels."""
    return tl.program_id(1) * BC + tl.arange(0, BC)


@triton.jit
def read(ptr, at, C: tl.constexpr, BC: tl.constexpr):
    """The program's channels of line ``at`` of an array [..., C], in float32; zeros past the last channel."""
    # one offset for all arrays of a token: their addresses then need no registers of their own
    offset = at * C + channels(BC)
    if C % BC == 0:
        return tl.load(ptr + offset).to(tl.float32)
    else:
        return tl.load(ptr + offset, mask=channels(BC) < C, other=0.0).to(tl.float32)


@triton.jit
def write(ptr, at, x, C: tl.constexpr, BC: tl.constexpr):
    """Stores what `read` would read, rounded to the dtype of memory."""
    offset = at * C + channels(BC)
    if C % BC == 0:
        tl.store(ptr + offset, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offset, x.to(ptr.dtype.element_ty), mask=channels(BC) < C)


@triton.jit
def read_sum(x_, y_, at, C: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr):
    """x, or with ``ADD`` x + y rounded as memory will have it."""
    x = read(x_, at, C, BC)
    if ADD:
        x = (x + read(y_, at, C, BC)).to(x_.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def statistics(xs, C: tl.constexpr, BC: tl.constexpr, EPS: tl.constexpr):
    """Means, and one over the standard deviations, of tokens; in two passes: a large mean costs no digits."""
    means, squares, rstds = (), (), ()
    totals = sums(xs)
    for u in tl.static_range(len(xs)):
        mean = totals[u] / C
        x = xs[u] - mean
        if C != BC:
            x = tl.where(tl.arange(0, BC) < C, x, 0.0)
        means, squares = extended(means, mean), extended(squares, x * x)
    totals = sums(squares)
    for u in tl.static_range(len(xs)):
        rstds = extended(rstds, tl.math.rsqrt(totals[u] / C + EPS))
    return means, rstds


@triton.jit
def begins(seg_, base, t, SEG: tl.constexpr):
    """Whether token t begins a segment and sees nothing of the one before; a row's first token does not."""
    if SEG:
        return (t > 0) & (tl.load(seg_ + base + t) != tl.load(seg_ + base + tl.maximum(t - 1, 0)))
    else:
        return False
