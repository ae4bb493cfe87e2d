"""What the kernels of norm, shift and mixes share: which tokens a program walks, their channels and their statistics.

Rows are cut into stretches of ``span`` tokens. A program walks the tokens of one stretch, with ``BC`` channels of a
token in its registers: all ``C`` of them (``WHOLE``), and then it sums over channels itself, or one of several tiles of
them (program axis 1), and then another kernel does.
"""

import triton
import triton.language as tl


@triton.jit
def stretch(T, span):
    """The program's row, its row's first token in [B * T], and its own first token and the one after its last."""
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
def statistics(x, C: tl.constexpr, BC: tl.constexpr, EPS: tl.constexpr):
    """Mean, and one over the standard deviation, of a token's channels; in two passes, so that a large mean costs no digits."""
    mean = tl.sum(x, 0) / C
    x -= mean
    if C != BC:
        x = tl.where(tl.arange(0, BC) < C, x, 0.0)
    return mean, tl.math.rsqrt(tl.sum(x * x, 0) / C + EPS)


@triton.jit
def begins(seg_, base, t, SEG: tl.constexpr):
    """Whether a segment begins at token t, which then sees nothing of the one before; a row's first token sees what was carried in."""
    if SEG:
        return (t > 0) & (tl.load(seg_ + base + t) != tl.load(seg_ + base + tl.maximum(t - 1, 0)))
    else:
        return False
