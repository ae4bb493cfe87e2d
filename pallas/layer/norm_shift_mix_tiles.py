"""Functions shared by the kernels of norm, token shift and mixes: a program's tokens, channels, statistics.

A program scans a block of ``block_len`` tokens and has ``BC`` channels of a token in registers: all ``C`` of
them (variant "whole"), or one of several tiles (program axis 1), whose sums over channels another kernel
completes.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.sums import extended, sums


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Compile-time facts of a launch.

    Attributes:
        C: channels of a token.
        BC: channels that a program has.
        stages: depth of the load pipeline.
        tokens: tokens whose sums over channels are computed together.
        eps: added to the variance.
    """

    C: int
    BC: int
    stages: int
    tokens: int
    eps: float


class Dims(NamedTuple):
    """Lengths that are known at run time: sequences, tokens of a sequence, tokens of a program's block."""

    B: Tensor
    T: Tensor
    block_len: Tensor


class Stats(NamedTuple):
    """Statistics of the norm, [B, T] float32: means, and one over the standard deviations."""

    mean: Tensor
    rstd: Tensor


@triton.jit
def token_block(dims):
    """The program's sequence, its first token in [B * T], and the block's first token and end."""
    count = tl.cdiv(dims.T, dims.block_len)
    batch = (tl.program_id(0) // count).to(tl.int64)
    start = (tl.program_id(0) % count) * dims.block_len
    return batch, batch * dims.T, start, tl.minimum(start + dims.block_len, dims.T)


@triton.jit
def tile_channels(c: tl.constexpr):
    """The program's channels."""
    return tl.program_id(1) * c.BC + tl.arange(0, c.BC)


@triton.jit
def read(ptr, at, c: tl.constexpr):
    """The program's channels of vector ``at`` of an array [..., C], in float32; zeros past the last one."""
    # one offset for all arrays of a token: their addresses then share registers
    offset = at * c.C + tile_channels(c)
    if c.C % c.BC == 0:
        return tl.load(ptr + offset).to(tl.float32)
    else:
        return tl.load(ptr + offset, mask=tile_channels(c) < c.C, other=0.0).to(tl.float32)


@triton.jit
def write(ptr, at, value, c: tl.constexpr):
    """Stores what `read` reads, rounded to the dtype of memory."""
    offset = at * c.C + tile_channels(c)
    if c.C % c.BC == 0:
        tl.store(ptr + offset, value.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offset, value.to(ptr.dtype.element_ty), mask=tile_channels(c) < c.C)


@triton.jit
def read_sum(x, at, c: tl.constexpr):
    """A token of x (+ y), rounded to the dtype of memory."""
    total = read(x.x, at, c)
    if x.y is not None:
        total = (total + read(x.y, at, c)).to(x.x.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def statistics(xs, c: tl.constexpr):
    """Means of tokens, and one over their standard deviations, in two passes: exact for large means."""
    means, squares, rstds = (), (), ()
    totals = sums(xs)
    for u in tl.static_range(len(xs)):
        mean = totals[u] / c.C
        centred = xs[u] - mean
        if c.C != c.BC:
            centred = tl.where(tl.arange(0, c.BC) < c.C, centred, 0.0)
        means, squares = extended(means, mean), extended(squares, centred * centred)
    totals = sums(squares)
    for u in tl.static_range(len(xs)):
        rstds = extended(rstds, tl.math.rsqrt(totals[u] / c.C + c.eps))
    return means, rstds


@triton.jit
def starts_segment(segment_ids, base, t):
    """Whether token t starts a segment and has no previous token there; False for the first token."""
    if segment_ids is not None:
        return (t > 0) & (
            tl.load(segment_ids + base + t) != tl.load(segment_ids + base + tl.maximum(t - 1, 0))
        )
    else:
        return False
