"""Decay factors of a chunk and the scores made with them, shared by the chunked Triton kernels.

In the bounded form exp(G) and exp(-G) from the chunk's start on, times the form's gauge and divided by it,
serve scores and state alike. In the form for any decay (docs/maths.md, section 7) decays may be as strong as
they like:

* Exact is what the entering state hands to the chunk's tokens and to the leaving state, and what their
  gradients hand back to it: exponentials of sums of the log decays themselves, LOG_ZERO in place of -inf.
* Clamped is what tokens of one chunk hand to each other and to the leaving state: it is the product of a row
  and a column factor, of which one may take decays back. Rows refer to the middle of their own block of 8
  tokens and columns to both middles, so that at most four log decays are taken back: counted down to LOG_MIN
  only, that is at most exp(64), and no less than exp(-64) shows in a score or in the gradient of a decay.
* The tokens of RWKV-7 write what they read of the state, so that their writes may be as large as it. With
  ``DELTA`` log decays are counted down to LOG_FEW, 7e-13, where few of the four in a quarter of the chunk are
  strong: one or two, or the first of three. Exponents are at most 69 then.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chunk import state_scale
from .dots import dot, token_sums

LOG2E = tl.constexpr(1.4426950408889634)
LOG_ZERO = tl.constexpr(-128.0)  # exp is 0 in float32; unlike -inf it may be multiplied by 0
LOG_MIN = tl.constexpr(-16.0)  # exp(-16) = 1.1e-7 is the spacing of float32
LOG_FEW = tl.constexpr(-28.0)


class DecayFactors(NamedTuple):
    """Decay factors of a chunk, [16, K], and of the state, [K].

    ``incl`` is for rows that read the state after their token's decay, ``excl`` for rows that read it before.

    Attributes:
        score_incl: of rows, for the scores.
        score_excl: of rows, for the scores.
        low: of columns, for the scores of rows 0..7.
        high: of columns, for the scores of rows 8..15 and for the leaving state.
        state_incl: of rows, for what they read of the entering state.
        state_excl: of rows, for what they read of the entering state.
        pre: decay of the state before the chunk's writes; in the bounded form nothing of use.
        post: decay of the state after the chunk's writes; in the bounded form all of it.
        cut: what clamping took from each token's decay, a factor; in the bounded form nothing of use.
    """

    score_gi: Any
    score_ge: Any
    first_half: Any
    second_half: Any
    state_gi: Any
    state_ge: Any
    decay_pre: Any
    decay_post: Any
    clamp_ratio: Any


@triton.jit
def at_least(w, lowest):
    """Log decays ``w``, but not below ``lowest``, in w's dtype."""
    return tl.maximum(w.to(tl.float32), lowest).to(w.dtype)


@triton.jit
def lowest_logs(w, c: tl.constexpr, BATCHED16: tl.constexpr):
    """Down to where RWKV-7 counts the log decays ``w`` [16, K] in scores: LOG_FEW or LOG_MIN, a tile.

    The sums below are over the four tokens of a quarter, of log decays counted down to LOG_MIN, of which
    later ones count 21 / 32. With n strong ones the sums of these are -26.5 and -32 (n = 2), -37, -42.5 and
    -48 (n = 3), -47.5 or less (n = 4), and less by what the mild ones add. So down to LOG_FEW are counted one
    or two strong ones and the first of three, and of four not one, so that exponents stay below 69.
    """
    t, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    quarter = tl.where(j // 4 == t // 4, tl.where(j <= t, 1.0, 0.65625), 0.0)
    return tl.where(token_sums(quarter, at_least(w, LOG_MIN), c, BATCHED16) < -41.0, LOG_MIN, LOG_FEW)


@triton.jit
def safe_gate_factors(gi, ge, back, total):
    """The factors of the bounded form, from the chunk's start on: with and without the token's own decay, its
    inverse, and the decay of the whole chunk.
    """
    return DecayFactors(gi, ge, back, back, gi, ge, decay_pre=total, decay_post=total, clamp_ratio=total)


@triton.jit
def sums_to_middles(i, s):
    """Matrices of 0 and +-1, by which log decays of tokens ``i`` sum up for token ``s``: from the middle of
    its half to it, and from it to the second middle.
    """
    middle = tl.where(s < 8, 4, 12)
    to_row = tl.where((middle <= i) & (i <= s), 1.0, tl.where((s < i) & (i < middle), -1.0, 0.0))
    return to_row, tl.where((s < i) & (i < 12), 1.0, tl.where((i >= 12) & (i <= s), -1.0, 0.0))


@triton.jit
def in_first_half(t, EXCLUSIVE):
    """Which rows refer to the first middle: of tokens 0..7, and of token 8 where rows are without their own
    decay (``EXCL``, 1 or 0). So no factor holds more than four decays.
    """
    return t < 8 + EXCLUSIVE


@triton.jit
def decay_factors(w, gate, c: tl.constexpr, DELTA: tl.constexpr, BATCHED16: tl.constexpr = False, last=False):
    """The factors for log decays ``w`` [16, K]; all sums over tokens are products with constant triangles.

    Forward and carry kernel make them with ``SPREAD``, see `token_sums`, of ``w`` [K / 16, 16, 16], loaded as
    they want it: Triton copies the next chunks' tiles into shared memory in the background only where their
    order in memory is the order in which a product reads them. It goes into products only, with the identity
    in place of a cast.
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
        # sums from the middles on: differences of sums from the chunk's start are too large to be exact
        before, _ = sums_to_middles(j, t - 1)
        to_row, to_middle = sums_to_middles(j, t)
        Rx = token_sums(before, counted, c, BATCHED16) * LOG2E
        # with its own decay token 8 is the first of the second half, without the last of the first one
        R = token_sums(to_row, counted, c, BATCHED16) * LOG2E if DELTA else Rx + counted_g
        second_half = tl.exp2(token_sums(to_middle, counted, c, BATCHED16) * LOG2E)
        Gx = token_sums(tl.where(j < t, 1.0, 0.0), whole, c, BATCHED16) * LOG2E
        G = Gx + g
        decay_post = tl.sum(tl.where(t == 15, R, 0.0), 0)  # as the columns, whose way it ends
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
    """The factors of the bounded form by scans, which are shorter than products where there is little besides
    that waits for them: in the forward of RWKV-6.
    """
    w = w.to(tl.float32)
    start = tl.where(tl.arange(0, 16)[:, None] == 0, gate.to(tl.float32), 0.0)
    g = w * LOG2E + start
    G = tl.cumsum(g, 0)
    gi, ge, back = tl.exp2(G), tl.exp2(G - w * LOG2E), tl.exp2(-G)
    total = tl.exp2(tl.sum(g, 0) - tl.where(last, 0, gate).to(tl.float32))
    return safe_gate_factors(gi, ge, back, total)


class Queries(NamedTuple):
    """What reads, [16, K], times its decay factors: for the entering state and for the scores."""

    state: Any
    score: Any


class Keys(NamedTuple):
    """What writes, [16, K], times its decay factors: for rows 0..7; for rows 8..15 and the leaving state."""

    first_half: Any
    second_half: Any


@triton.jit
def masked_A(queries, keys, mask, c: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns; ``EXCL`` says
    that rows are without their own decay.
    """
    A = dot(queries.score, tl.trans(keys.second_half), c)
    if c.unsafe_gate:
        first_half = in_first_half(tl.arange(0, 16)[:, None], EXCLUSIVE)
        A = tl.where(first_half, dot(queries.score, tl.trans(keys.first_half), c), A)
    return tl.where(mask, A, 0.0)
