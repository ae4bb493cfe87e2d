"""Decay factors of a chunk and the scores made with them, shared by the chunked Triton kernels.

In the bounded form (16 * |w| <= 80) exp(G) and exp(-G) from the chunk's start on serve scores and state
alike. In the form for any decay rows refer to the middle of their own block of 8 tokens and columns to both
middles; docs/maths.md, section 7, derives it. Log decays count only down to LOG_MIN there. Between a token
and the middle of its block lie at most four of them: a factor that takes them back is at most exp(64). A
column on its way to the second middle may hold more, but with one decay between the pair, which is the most
that shows in a score, it holds five: exp(-80), in range with room for small keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .products import token_sums

LOG2E = tl.constexpr(1.4426950408889634)
LOG_MIN = tl.constexpr(-16.0)  # exp(-16) = 1.1e-7 is the spacing of a float32 state


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
    """

    score_incl: Any
    score_excl: Any
    low: Any
    high: Any
    state_incl: Any
    state_excl: Any
    pre: Any
    post: Any


@triton.jit
def clamped(w, mode: tl.constexpr):
    """Log decays as the form for any decay counts them, in w's dtype; in the bounded form as they are."""
    return tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype) if mode.any_decay else w


@triton.jit
def factors(w, mode: tl.constexpr):
    """The factors for clamped log decays ``w`` [16, K], by products with constant triangles."""
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    g = w.to(tl.float32) * LOG2E
    G = token_sums(tl.where(j <= t, 1.0, 0.0), w, mode) * LOG2E
    incl, excl = tl.exp2(G), tl.exp2(G - g)
    if mode.any_decay:
        # sums from the middles on: differences of sums from the chunk's start are too large to be exact
        own = tl.where(t < 8, 4, 12)
        to_row = tl.where((own <= j) & (j <= t), 1.0, tl.where((t < j) & (j < own), -1.0, 0.0))
        to_middle = tl.where((t < j) & (j < 12), 1.0, tl.where((j >= 12) & (j <= t), -1.0, 0.0))
        R = token_sums(to_row, w, mode) * LOG2E
        high = tl.exp2(token_sums(to_middle, w, mode) * LOG2E)
        pre = tl.sum(tl.where(t == 11, incl, 0.0), 0)
        post = tl.exp2(tl.sum(tl.where(t == 15, R, 0.0), 0))
        return Factors(
            score_incl=tl.exp2(R),
            score_excl=tl.exp2(R - g),
            low=tl.where(t < 8, tl.exp2(-R), 0.0),
            high=high,
            state_incl=incl,
            state_excl=excl,
            pre=pre,
            post=post,
        )
    else:
        back = tl.exp2(-G)
        total = tl.sum(tl.where(t == 15, incl, 0.0), 0)
        return Factors(
            incl, excl, low=back, high=back, state_incl=incl, state_excl=excl, pre=total, post=total
        )


@triton.jit
def scanned_factors(w, mode: tl.constexpr):
    """As `factors`, by scans and sums, which are shorter with two warps.

    In the form for any decay these are exponentials of differences of large sums from the chunk's start, each
    good to 1e-5; the error cancels in every product of two of them, which is all that a forward makes.
    """
    t = tl.arange(0, 16)[:, None]
    g = w.to(tl.float32) * LOG2E
    G = tl.cumsum(g, 0)
    Gx = G - g
    incl, excl = tl.exp2(G), tl.exp2(Gx)
    if mode.any_decay:
        first = tl.sum(tl.where(t < 4, g, 0.0), 0)[None, :]
        second, total = tl.sum(tl.where(t < 12, g, 0.0), 0), tl.sum(g, 0)
        own = tl.where(t < 8, first, second[None, :])
        low = tl.where(t < 8, tl.exp2(tl.where(t < 8, first - G, 0.0)), 0.0)
        return Factors(
            score_incl=tl.exp2(G - own),
            score_excl=tl.exp2(Gx - own),
            low=low,
            high=tl.exp2(second[None, :] - G),
            state_incl=incl,
            state_excl=excl,
            pre=tl.exp2(second),
            post=tl.exp2(total - second),
        )
    else:
        back, total = tl.exp2(-G), tl.exp2(tl.sum(g, 0))
        return Factors(
            incl, excl, low=back, high=back, state_incl=incl, state_excl=excl, pre=total, post=total
        )


class Rows(NamedTuple):
    """What reads, [16, K], times its decay factors: for the entering state and for the scores."""

    state: Any
    score: Any


class Columns(NamedTuple):
    """What writes, [16, K], times its decay factors: for rows 0..7; for rows 8..15 and the leaving state."""

    low: Any
    high: Any


@triton.jit
def score(rows, columns, mask, mode: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns."""
    A = tl.dot(rows.score, tl.trans(columns.high), input_precision=mode.precision)
    if mode.any_decay:
        low = tl.arange(0, 16)[:, None] < 8
        A = tl.where(low, tl.dot(rows.score, tl.trans(columns.low), input_precision=mode.precision), A)
    return tl.where(mask, A, 0.0)
