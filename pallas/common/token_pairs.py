"""Gradients of one interval of tokens by pairs of tokens, for both ops: the kernels that first sum over
values, and functions of those in rwkv6/pair_gradients.py and rwkv7/pair_gradients.py.

The state inside an interval is the sum of S0, the state at its start, and what tokens i wrote, ``x_i z_i^T``,
each decayed since; its gradient is the sum of D, that of the state at its end, and what tokens t read,
``x_t y_t^T``. RWKV-7 writes (k, v) and (b, a^T S) and reads (r, do), of the state after the token, and (a,
b^T D), of the state before it; RWKV-6 writes (k, v) and reads (r, do), of the state before. So every gradient
is a sum over pairs with scores ``y_t . z_i`` and factors ``e_ti = exp(w_{i+1} + .. + w_t)`` (to ``w_{t-1}``
for a reader of the state before): products of decays, no quotient and no difference. dw_j sums all pairs that
it lies between:

    dx_t = sum_{i<t} e_ti (y_t . z_i) x_i + e_t S0 y_t,     dx_i = sum_{t>i} e_ti (y_t . z_i) x_t + e_i D z_i
    dw_j = sum_{i<j<=t} e_ti (y_t . z_i) x_t x_i + the pairs with S0 for a writer before the first token and D
    for a reader after the last

Tiles of the pair kernels are [interval, BK] in registers of one warp; line i belongs to the writer before
token i, line 0 to S0; lines of later tokens are zero. They are made in the loop and never loaded, so that
Triton gives each key to a lane and sums over lines stay within a thread.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from .dots import tf32_part
from .token_scan import interval_tokens


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """Everything that a launch is compiled for.

    Attributes:
        H: heads.
        K: keys of a head.
        V: values of a head.
        BK: keys of a program, a power of two.
        BV: values at a time, a power of two.
        interval: tokens between saved states.
        segments: whether a sequence has segments, at whose first token the state restarts.
        packed: whether sequences are packed along T.
        scale: factor of do.
        tf32x3: whether products of float32 operands are computed from their TF32 parts.
    """

    H: int
    K: int
    V: int
    BK: int
    BV: int
    interval: int
    segments: bool
    packed: bool
    scale: float
    tf32x3: bool


class TokenValues(NamedTuple):
    """Arrays [B, T, H, V]: what readers' outputs meet, do first, or what writers write. ``second`` is None
    for RWKV-6.
    """

    first: Tensor
    second: Tensor


class States(NamedTuple):
    """Saved states [intervals, H, K, V] to be multiplied with values, and perhaps others for the product of
    both.
    """

    states: Tensor
    others: Tensor


class StateSums(NamedTuple):
    """Products with states: of each array of values [intervals, H, interval, K], and of both states over
    values [intervals, H, K].
    """

    first: Tensor
    second: Tensor
    product: Tensor


class Scores(NamedTuple):
    """Products of tokens, for each reader and writer.

    Attributes:
        pairs: [intervals, H, readers, writers, interval, interval], ``y_t . z_{i-1}``; i = 0 is unused.
        same: [intervals, H, writers, interval], ``do . z`` of one token.
    """

    pairs: Tensor
    same: Tensor


@triton.jit
def add_product(x, y, acc, c: tl.constexpr):
    """``acc + x @ y^T`` to float32 accuracy.

    Tensor cores truncate what they accumulate, so the small and the large products of TF32 parts are summed
    apart and added by separate instructions.
    """
    x32, y32 = x.to(tl.float32), tl.trans(y.to(tl.float32))
    if c.tf32x3:
        high_x, high_y = x32, y32
        if x.dtype == tl.float32:
            high_x = tf32_part(x32)
            acc = tl.fma(tl.dot(x32 - high_x, tf32_part(y32), input_precision="tf32"), 1.0, acc)
        if y.dtype == tl.float32:
            high_y = tf32_part(y32)
            acc = tl.fma(tl.dot(high_x, y32 - high_y, input_precision="tf32"), 1.0, acc)
        return tl.fma(tl.dot(high_x, high_y, input_precision="tf32"), 1.0, acc)
    else:
        return tl.dot(x32, y32, acc, input_precision="ieee")


@triton.jit
def value_tile(ptr, tokens, block, SHIFT: tl.constexpr, c: tl.constexpr):
    """[interval, BV] values of the interval's tokens, or with ``SHIFT`` 1 of the tokens before them; zeros
    where there is none.
    """
    t = tl.arange(0, c.interval)[:, None] - SHIFT
    value = block * c.BV + tl.arange(0, c.BV)[None, :]
    at = ((tokens.first + t) * c.H + tl.program_id(1)) * c.V + value
    return tl.load(ptr + at, mask=(t >= 0) & (t < tokens.length) & (value < c.V), other=0.0)


@triton.jit
def state_sums_kernel(y, states, index, out, c: tl.constexpr):
    """Grid: blocks of keys, heads, intervals."""
    tokens = interval_tokens(index, c)
    entry = tokens.interval * c.H + tl.program_id(1)
    key = tl.program_id(0) * c.BK + tl.arange(0, c.BK)
    first, second = tl.full([c.interval, c.BK], 0.0, tl.float32), tl.full([c.interval, c.BK], 0.0, tl.float32)
    product = tl.full([c.BK], 0.0, tl.float32)
    for block in range(0, tl.cdiv(c.V, c.BV)):
        value = block * c.BV + tl.arange(0, c.BV)
        at = entry * (c.K * c.V) + key[:, None] * c.V + value[None, :]
        mask = (key < c.K)[:, None] & (value < c.V)[None, :] & (tokens.length > 0)
        S = tl.load(states.states + at, mask=mask, other=0.0)
        first = add_product(value_tile(y.first, tokens, block, 0, c), S, first, c)
        if y.second is not None:
            second = add_product(value_tile(y.second, tokens, block, 0, c), S, second, c)
        if states.others is not None:
            product += tl.sum(S * tl.load(states.others + at, mask=mask, other=0.0), 1)
    at = (entry * c.interval + tl.arange(0, c.interval)[:, None]) * c.K + key[None, :]
    mask = (tl.arange(0, c.interval) >= 0)[:, None] & (key < c.K)[None, :]
    tl.store(out.first + at, first * c.scale, mask=mask)
    if y.second is not None:
        tl.store(out.second + at, second, mask=mask)
    if states.others is not None:
        tl.store(out.product + entry * c.K + key, product, mask=key < c.K)


@triton.jit
def store_scores(pairs, i: tl.constexpr, j: tl.constexpr, N: tl.constexpr, x, c: tl.constexpr):
    """Stores scores of reader ``i`` and writer ``j``, of ``N`` each."""
    t = tl.arange(0, c.interval)
    entry = (tl.program_id(2).to(tl.int64) * c.H + tl.program_id(1)) * (N * N) + i * N + j
    tl.store(pairs + (entry * c.interval + t[:, None]) * c.interval + t[None, :], x)


@triton.jit
def scores_kernel(y, z, index, out, c: tl.constexpr):
    """Grid: 1, heads, intervals."""
    tokens = interval_tokens(index, c)
    N: tl.constexpr = 1 if z.second is None else 2
    zero, none = tl.full([c.interval, c.interval], 0.0, tl.float32), tl.full([c.interval], 0.0, tl.float32)
    s00, s01, s10, s11, same0, same1 = zero, zero, zero, zero, none, none
    for block in range(0, tl.cdiv(c.V, c.BV)):
        y0, z0 = value_tile(y.first, tokens, block, 0, c), value_tile(z.first, tokens, block, 0, c)
        before0 = value_tile(z.first, tokens, block, 1, c)
        same0 += tl.sum(y0.to(tl.float32) * z0.to(tl.float32), 1)
        s00 = add_product(y0, before0, s00, c)
        if z.second is not None:
            y1, z1 = value_tile(y.second, tokens, block, 0, c), value_tile(z.second, tokens, block, 0, c)
            before1 = value_tile(z.second, tokens, block, 1, c)
            same1 += tl.sum(y0.to(tl.float32) * z1.to(tl.float32), 1)
            s01 = add_product(y0, before1, s01, c)
            s10 = add_product(y1, before0, s10, c)
            s11 = add_product(y1, before1, s11, c)
    store_scores(out.pairs, 0, 0, N, s00 * c.scale, c)
    t = tl.arange(0, c.interval)
    same = out.same + (tl.program_id(2).to(tl.int64) * c.H + tl.program_id(1)) * (N * c.interval) + t
    tl.store(same, same0 * c.scale)
    if z.second is not None:
        store_scores(out.pairs, 0, 1, N, s01 * c.scale, c)
        store_scores(out.pairs, 1, 0, N, s10, c)
        store_scores(out.pairs, 1, 1, N, s11, c)
        tl.store(same + c.interval, same1 * c.scale)


class PairAxes(NamedTuple):
    """The axes of a program of a pair kernel.

    Attributes:
        tokens: the interval's.
        entry: number of the interval and head.
        key: [BK].
        has_key: whether they exist.
        line: [interval, 1].
    """

    tokens: Tensor
    entry: Tensor
    key: Tensor
    has_key: Tensor
    line: Tensor


@triton.jit
def pair_axes(index, c: tl.constexpr):
    """The axes, of the block of keys of program axis 0."""
    tokens = interval_tokens(index, c)
    key = tl.program_id(0) * c.BK + tl.arange(0, c.BK)
    entry = tokens.interval * c.H + tl.program_id(1)
    return PairAxes(tokens, entry, key, key < c.K, tl.arange(0, c.interval)[:, None])


@triton.jit
def token_keys(ptr, t, axes, c: tl.constexpr):
    """[BK] float32, token ``t`` of an input; zeros where there is none."""
    at = ((axes.tokens.first + t) * c.H + tl.program_id(1)) * c.K + axes.key
    return tl.load(ptr + at, mask=axes.has_key & (t < axes.tokens.length), other=0.0).to(tl.float32)


@triton.jit
def summed_keys(ptr, t, axes, c: tl.constexpr):
    """[BK], token ``t`` of a sum over values."""
    at = (axes.entry * c.interval + t) * c.K + axes.key
    return tl.load(ptr + at, mask=axes.has_key, other=0.0)


@triton.jit
def pair_scores(scores, i: tl.constexpr, j: tl.constexpr, N: tl.constexpr, t, axes, c: tl.constexpr):
    """[interval], scores of reader ``i`` of token ``t`` and writer ``j`` of the tokens before each."""
    at = ((axes.entry * (N * N) + i * N + j) * c.interval + t) * c.interval
    return tl.load(scores.pairs + at + tl.arange(0, c.interval))


@triton.jit
def same_score(scores, j: tl.constexpr, N: tl.constexpr, t, axes, c: tl.constexpr):
    """The score of do and writer ``j`` of token ``t``."""
    return tl.load(scores.same + (axes.entry * N + j) * c.interval + t)


class Lines(NamedTuple):
    """1 for the lines before token t, its own and the next one, [interval]; else 0."""

    before: Tensor
    own: Tensor
    after: Tensor


@triton.jit
def load_lines(lines, t, c: tl.constexpr):
    """The lines of token ``t``, from an array [3, interval, interval]: comparisons would take more
    instructions than the sums.
    """
    at = lines + t * c.interval + tl.arange(0, c.interval)
    n: tl.constexpr = c.interval * c.interval
    return Lines(tl.load(at), tl.load(at + n), tl.load(at + 2 * n))


@triton.jit
def restarted_decays(E, index, t, axes, c: tl.constexpr):
    """Zeros where the state restarts before token ``t``."""
    if c.segments:
        restart = tl.load(index.restarts + axes.tokens.first + t, mask=t < axes.tokens.length, other=0)
        E = tl.where(restart == 0, E, 0.0)
    return E


@triton.jit
def writes_to_end(ptr, axes, c: tl.constexpr):
    """[interval, BK], ``D z`` of the writer of each line; line 0 is unused."""
    at = (axes.entry * c.interval + tl.maximum(axes.line - 1, 0)) * c.K + axes.key[None, :]
    return tl.load(ptr + at, mask=axes.has_key[None, :], other=0.0)


@triton.jit
def store_token(ptr, t, x, axes, c: tl.constexpr):
    """Stores a gradient [BK] of token ``t``."""
    at = ((axes.tokens.first + t) * c.H + tl.program_id(1)) * c.K + axes.key
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=axes.has_key & (t < axes.tokens.length))


@triton.jit
def store_lines(ptr, x, SHIFT: tl.constexpr, axes, c: tl.constexpr):
    """Stores a gradient whose line i is token ``i - SHIFT``."""
    t = axes.line - SHIFT
    at = ((axes.tokens.first + t) * c.H + tl.program_id(1)) * c.K + axes.key[None, :]
    mask = (t >= 0) & (t < axes.tokens.length) & axes.has_key[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)
