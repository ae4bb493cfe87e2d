"""Decay factors of a chunk, and the A matrices that they make.

Under a safe gate exp(G) and exp(-G), with G summed from the chunk's start and centred by the gate, serve A
and the state alike. Under an unsafe gate (docs/maths.md, section 7) decays may be arbitrarily strong:

* Factors between the state at the start, the chunk's tokens and the state at the end are exact: exponentials
  of sums of the log decays, with LOG_ZERO for -inf.
* Factors between tokens of the chunk, and from tokens to the state at the end, are clamped: each is the
  product of a q and a k factor, of which one may undo decays. Queries refer to the middle of their half of
  the chunk and keys to both middles, so at most four log decays are undone, clamped at LOG_MIN: no factor
  exceeds exp(64), and none below exp(-64) shows in A or in the gradient of a decay.
* In RWKV-7 (``DELTA``) tokens write what they read from the state, so writes may be as large as the state.
  There a quarter of the chunk with few strong decays is clamped at LOG_FEW = log 7e-13; exponents stay below
  69.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from .dots import dot, token_sums
from .gate import state_scale

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)  # 12 bits, so n times it is exact
LOG_ZERO = tl.constexpr(-128.0)  # exp is 0 in float32, and unlike -inf times 0 is 0
LOG_MIN = tl.constexpr(-16.0)  # exp(-16) = 1.1e-7 is the spacing of float32
LOG_FEW = tl.constexpr(-28.0)


@triton.jit
def token_decay(w):
    """exp(w) of log decays in float32, to one unit in the last place.

    Token by token an error is repeated for as long as a state lasts, and `tl.exp` is up to two off.
    exp(w) = 2^n (1 + expm1(f)), with n = round(w / log 2), f = w - n log 2 and the series of expm1.
    """
    w = tl.where(w < LOG_ZERO, LOG_ZERO, w)
    n = tl.floor(w * LOG2E + 0.5)
    f = (w - n * LN2_HIGH) - n * LN2_LOW
    series = 1 / 24 + f * (1 / 120 + f * (1 / 720 + f * (1 / 5040)))
    expm1 = f + f * f * (0.5 + f * (1 / 6 + f * series))
    return (1.0 + expm1) * tl.exp2(n)


class DecayFactors(NamedTuple):
    """Decay factors of a chunk, [16, K], and of the state, [K].

    ``gi`` is for queries of the state after their token's decay (r of RWKV-7), ``ge`` for queries before it.

    Attributes:
        score_gi, score_ge: of queries, for A.
        first_half: of keys, for A of the queries of the first half (`in_first_half`).
        second_half: of keys, for A of the other queries and for the state at the end.
        state_gi, state_ge: of queries, for the state at the start.
        decay_pre: of the state before the chunk's writes; undefined under a safe gate.
        decay_post: of the state after the chunk's writes; under a safe gate the whole decay.
        clamp_ratio: each token's decay divided by its clamped decay; undefined under a safe gate.
    """

    score_gi: Tensor
    score_ge: Tensor
    first_half: Tensor
    second_half: Tensor
    state_gi: Tensor
    state_ge: Tensor
    decay_pre: Tensor
    decay_post: Tensor
    clamp_ratio: Tensor


@triton.jit
def at_least(w, lowest):
    """Log decays ``w``, but not below ``lowest``, in w's dtype."""
    return tl.maximum(w.to(tl.float32), lowest).to(w.dtype)


@triton.jit
def lowest_logs(w, c: tl.constexpr, BATCHED16: tl.constexpr):
    """Where RWKV-7 clamps the log decays ``w`` [16, K] in A: LOG_FEW or LOG_MIN, a tile.

    The sum is over the four tokens of a quarter, of log decays clamped at LOG_MIN, with weight 21 / 32 for
    later tokens. With n strong decays it is -26.5 or -32 (n = 2), -37, -42.5 or -48 (n = 3), at most -47.5
    (n = 4), and lower by the mild ones. So LOG_FEW holds for one or two strong decays and the first of
    three, and for none of four: exponents stay below 69.
    """
    t, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    quarter = tl.where(j // 4 == t // 4, tl.where(j <= t, 1.0, 0.65625), 0.0)
    return tl.where(token_sums(quarter, at_least(w, LOG_MIN), c, BATCHED16) < -41.0, LOG_MIN, LOG_FEW)


@triton.jit
def safe_gate_factors(gi, ge, back, total):
    """Safe factors from the chunk's start: with and without the token's decay, the inverse, and the whole
    decay."""
    return DecayFactors(gi, ge, back, back, gi, ge, decay_pre=total, decay_post=total, clamp_ratio=total)


@triton.jit
def sums_to_middles(i, s):
    """Matrices of 0 and +-1 that sum log decays of tokens ``i`` for token ``s``: from the middle of its half
    to it, and from it to the second middle.
    """
    middle = tl.where(s < 8, 4, 12)
    to_query = tl.where((middle <= i) & (i <= s), 1.0, tl.where((s < i) & (i < middle), -1.0, 0.0))
    return to_query, tl.where((s < i) & (i < 12), 1.0, tl.where((i >= 12) & (i <= s), -1.0, 0.0))


@triton.jit
def in_first_half(t, EXCLUSIVE):
    """Whether the query of token ``t`` refers to the first middle: tokens 0 to 7, and token 8 if queries
    precede their decay (``EXCLUSIVE`` 1, else 0), so that no factor has more than four decays.
    """
    return t < 8 + EXCLUSIVE


@triton.jit
def decay_factors(w, gate, c: tl.constexpr, DELTA: tl.constexpr, BATCHED16: tl.constexpr = False, last=False):
    """The factors of log decays ``w`` [16, K]. Sums over tokens are products with constant triangles.

    With ``BATCHED16`` (`token_sums`) ``w`` is [K / 16, 16, 16], loaded in the layout in which products read
    it: only then Triton copies the next chunk's tile in the background. So products alone read it, here with
    the identity. ``last`` is whether the chunk is the last of the split.
    """
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    if c.unsafe_gate:
        whole = at_least(w, LOG_ZERO)
        if BATCHED16:
            plain = token_sums(tl.where(j == t, 1.0, 0.0), whole, c, BATCHED16)
            g = plain * LOG2E
        else:
            plain = w.to(tl.float32)
            g = whole.to(tl.float32) * LOG2E
        lowest = lowest_logs(w, c, BATCHED16) if DELTA else LOG_MIN
        counted = tl.maximum(plain, lowest).to(w.dtype)
        counted_g = counted.to(tl.float32) * LOG2E
        # summed from the middles: differences of sums from the chunk's start are not exact
        before, _ = sums_to_middles(j, t - 1)
        to_query, to_middle = sums_to_middles(j, t)
        Rx = token_sums(before, counted, c, BATCHED16) * LOG2E
        # after its decay token 8 is the first of the second half, before it the last of the first half
        R = token_sums(to_query, counted, c, BATCHED16) * LOG2E if DELTA else Rx + counted_g
        second_half = tl.exp2(token_sums(to_middle, counted, c, BATCHED16) * LOG2E)
        Gx = token_sums(tl.where(j < t, 1.0, 0.0), whole, c, BATCHED16) * LOG2E
        G = Gx + g
        decay_post = tl.sum(tl.where(t == 15, R, 0.0), 0)  # to the second middle, as the keys
        decay_pre = tl.sum(tl.where(t == 15, G, 0.0), 0) - decay_post
        return DecayFactors(
            score_gi=tl.exp2(R),
            score_ge=tl.exp2(Rx),
            first_half=tl.where(t < 8, tl.exp2(-R), 0.0),
            second_half=second_half,
            state_gi=tl.exp2(G),
            state_ge=tl.exp2(Gx),
            decay_pre=tl.exp2(decay_pre),
            decay_post=tl.exp2(decay_post),
            clamp_ratio=tl.exp2(g - counted_g),
        )
    else:
        G = token_sums(tl.where(j <= t, 1.0, 0.0), w, c, BATCHED16) * LOG2E + gate
        if BATCHED16:
            Gx = token_sums(tl.where(j < t, 1.0, 0.0), w, c, BATCHED16) * LOG2E + gate
        else:
            Gx = G - w.to(tl.float32) * LOG2E
        gi, ge, back = tl.exp2(G), tl.exp2(Gx), tl.exp2(-G)
        total = tl.sum(gi * tl.where(t == 15, tl.where(last, 1.0, state_scale(gate, c, False)), 0.0), 0)
        return safe_gate_factors(gi, ge, back, total)


@triton.jit
def safe_gate_factors_by_cumsum(w, gate, last):
    """`decay_factors` under a safe gate by scans, which are faster than products in the forward of RWKV-6."""
    w = w.to(tl.float32)
    start = tl.where(tl.arange(0, 16)[:, None] == 0, gate.to(tl.float32), 0.0)
    g = w * LOG2E + start
    G = tl.cumsum(g, 0)
    gi, ge, back = tl.exp2(G), tl.exp2(G - w * LOG2E), tl.exp2(-G)
    total = tl.exp2(tl.sum(g, 0) - tl.where(last, 0, gate).to(tl.float32))
    return safe_gate_factors(gi, ge, back, total)


class Queries(NamedTuple):
    """Queries [16, K] times their decay factors: for the state at the start, and for A."""

    state: Tensor
    score: Tensor


class Keys(NamedTuple):
    """Keys [16, K] times their decay factors: for the first half's queries; for the others and the state at
    the end."""

    first_half: Tensor
    second_half: Tensor


@triton.jit
def masked_A(queries, keys, mask, c: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """A [16, 16], masked: products of queries with the keys of their half (`in_first_half`)."""
    A = dot(queries.score, tl.trans(keys.second_half), c)
    if c.unsafe_gate:
        first_half = in_first_half(tl.arange(0, 16)[:, None], EXCLUSIVE)
        A = tl.where(first_half, dot(queries.score, tl.trans(keys.first_half), c), A)
    return tl.where(mask, A, 0.0)
