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

from .chunk import in_form
from .products import product, token_sums

LOG2E = tl.constexpr(1.4426950408889634)
LOG_ZERO = tl.constexpr(-128.0)  # exp is 0 in float32; unlike -inf it may be multiplied by 0
LOG_MIN = tl.constexpr(-16.0)  # exp(-16) = 1.1e-7 is the spacing of float32
LOG_FEW = tl.constexpr(-28.0)


class Factors(NamedTuple):
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

    score_incl: Any
    score_excl: Any
    low: Any
    high: Any
    state_incl: Any
    state_excl: Any
    pre: Any
    post: Any
    cut: Any


@triton.jit
def at_least(w, lowest):
    """Log decays ``w``, but not below ``lowest``, in w's dtype."""
    return tl.maximum(w.to(tl.float32), lowest).to(w.dtype)


@triton.jit
def lowest_logs(w, mode: tl.constexpr, SPREAD: tl.constexpr):
    """Down to where RWKV-7 counts the log decays ``w`` [16, K] in scores: LOG_FEW or LOG_MIN, a tile.

    The sums below are over the four tokens of a quarter, of log decays counted down to LOG_MIN, of which
    later ones count 21 / 32. With n strong ones the sums of these are -26.5 and -32 (n = 2), -37, -42.5 and
    -48 (n = 3), -47.5 or less (n = 4), and less by what the mild ones add. So down to LOG_FEW are counted one
    or two strong ones and the first of three, and of four not one, so that exponents stay below 69.
    """
    t, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    quarter = tl.where(j // 4 == t // 4, tl.where(j <= t, 1.0, 0.65625), 0.0)
    return tl.where(token_sums(quarter, at_least(w, LOG_MIN), mode, SPREAD) < -41.0, LOG_MIN, LOG_FEW)


@triton.jit
def bounded_factors(incl, excl, back, total):
    """The factors of the bounded form, from the chunk's start on: with and without the token's own decay, its
    inverse, and the decay of the whole chunk.
    """
    return Factors(incl, excl, back, back, incl, excl, pre=total, post=total, cut=total)


@triton.jit
def sums_to_middles(i, s):
    """Matrices of 0 and +-1, by which log decays of tokens ``i`` sum up for token ``s``: from the middle of
    its half to it, and from it to the second middle.
    """
    middle = tl.where(s < 8, 4, 12)
    to_row = tl.where((middle <= i) & (i <= s), 1.0, tl.where((s < i) & (i < middle), -1.0, 0.0))
    return to_row, tl.where((s < i) & (i < 12), 1.0, tl.where((i >= 12) & (i <= s), -1.0, 0.0))


@triton.jit
def in_first_half(t, EXCL):
    """Which rows refer to the first middle: of tokens 0..7, and of token 8 where rows are without their own
    decay (``EXCL``, 1 or 0). So no factor holds more than four decays.
    """
    return t < 8 + EXCL


@triton.jit
def factors(w, form, mode: tl.constexpr, DELTA: tl.constexpr, SPREAD: tl.constexpr = False, last=False):
    """The factors for log decays ``w`` [16, K]; all sums over tokens are products with constant triangles.

    Forward and carry kernel make them with ``SPREAD``, see `token_sums`, of ``w`` [K / 16, 16, 16], loaded as
    they want it: Triton copies the next chunks' tiles into shared memory in the background only where their
    order in memory is the order in which a product reads them. It goes into products only, with the identity
    in place of a cast.
    """
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    if mode.any_decay:
        whole = at_least(w, LOG_ZERO)
        if SPREAD:
            plain = token_sums(tl.where(j == t, 1.0, 0.0), whole, mode, SPREAD)
            g = plain * LOG2E
        else:
            plain = w.to(tl.float32)
            g = whole.to(tl.float32) * LOG2E
        lowest = lowest_logs(w, mode, SPREAD) if DELTA else LOG_MIN
        counted = tl.maximum(plain, lowest).to(w.dtype)
        counted_g = counted.to(tl.float32) * LOG2E
        # sums from the middles on: differences of sums from the chunk's start are too large to be exact
        before, _ = sums_to_middles(j, t - 1)
        to_row, to_middle = sums_to_middles(j, t)
        Rx = token_sums(before, counted, mode, SPREAD) * LOG2E
        # with its own decay token 8 is the first of the second half, without the last of the first one
        R = token_sums(to_row, counted, mode, SPREAD) * LOG2E if DELTA else Rx + counted_g
        high = tl.exp2(token_sums(to_middle, counted, mode, SPREAD) * LOG2E)
        Gx = token_sums(tl.where(j < t, 1.0, 0.0), whole, mode, SPREAD) * LOG2E
        G = Gx + g
        post = tl.sum(tl.where(t == 15, R, 0.0), 0)  # as the columns, whose way it ends
        pre = tl.sum(tl.where(t == 15, G, 0.0), 0) - post
        return Factors(
            score_incl=tl.exp2(R),
            score_excl=tl.exp2(Rx),
            low=tl.where(t < 8, tl.exp2(-R), 0.0),
            high=high,
            state_incl=tl.exp2(G),
            state_excl=tl.exp2(Gx),
            pre=tl.exp2(pre),
            post=tl.exp2(post),
            cut=tl.exp2(g - counted_g),
        )
    else:
        G = token_sums(tl.where(j <= t, 1.0, 0.0), w, mode, SPREAD) * LOG2E + form
        if SPREAD:
            Gx = token_sums(tl.where(j < t, 1.0, 0.0), w, mode, SPREAD) * LOG2E + form
        else:
            Gx = G - w.to(tl.float32) * LOG2E
        incl, excl, back = tl.exp2(G), tl.exp2(Gx), tl.exp2(-G)
        total = tl.sum(incl * tl.where(t == 15, tl.where(last, 1.0, in_form(form, mode, False)), 0.0), 0)
        return bounded_factors(incl, excl, back, total)


@triton.jit
def scanned_factors(w, form, last):
    """The factors of the bounded form by scans, which are shorter than products where there is little besides
    that waits for them: in the forward of RWKV-6.
    """
    w = w.to(tl.float32)
    start = tl.where(tl.arange(0, 16)[:, None] == 0, form.to(tl.float32), 0.0)
    g = w * LOG2E + start
    G = tl.cumsum(g, 0)
    incl, excl, back = tl.exp2(G), tl.exp2(G - w * LOG2E), tl.exp2(-G)
    total = tl.exp2(tl.sum(g, 0) - tl.where(last, 0, form).to(tl.float32))
    return bounded_factors(incl, excl, back, total)


class Rows(NamedTuple):
    """What reads, [16, K], times its decay factors: for the entering state and for the scores."""

    state: Any
    score: Any


class Columns(NamedTuple):
    """What writes, [16, K], times its decay factors: for rows 0..7; for rows 8..15 and the leaving state."""

    low: Any
    high: Any


@triton.jit
def score(rows, columns, mask, mode: tl.constexpr, EXCL: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns; ``EXCL`` says
    that rows are without their own decay.
    """
    A = product(rows.score, tl.trans(columns.high), mode)
    if mode.any_decay:
        low = in_first_half(tl.arange(0, 16)[:, None], EXCL)
        A = tl.where(low, product(rows.score, tl.trans(columns.low), mode), A)
    return tl.where(mask, A, 0.0)
