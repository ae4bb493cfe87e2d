"""Decay factors of a chunk and the scores made with them, shared by the chunked Triton kernels.

With ``ANY = False`` (16 * |w| <= 80) exp(G) and exp(-G) from the chunk's start serve scores and state alike. With ``ANY = True`` rows refer
to the middle of their own block of 8 tokens, columns to both middles: exponents are at most 4 * |LOG_MIN|, whatever the decay.
"""

import triton
import triton.language as tl

from .common import LOG2E, token_sums


@triton.jit
def factors(w, ANY: tl.constexpr, PREC: tl.constexpr):
    """Decay factors [16, K] of a chunk with log decays ``w``, from products with constant triangles, and decays [K] of the state.

    Returns: rows r and a for the scores; columns for the scores of rows 0..7 and of rows 8..15 (also for the state); rows r and a for the state. Then the decay
    of the state before a chunk's writes and after them (bounded: the whole of it, twice).
    """
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    g = w.to(tl.float32) * LOG2E
    G = token_sums(tl.where(j <= t, 1.0, 0.0), w, PREC) * LOG2E
    eq, ea = tl.exp2(G), tl.exp2(G - g)
    if ANY:  # sums from the middles on, not differences of sums from the chunk's start: those are too large to be exact
        own = tl.where(t < 8, 4, 12)
        to_row = tl.where((own <= j) & (j <= t), 1.0, tl.where((t < j) & (j < own), -1.0, 0.0))
        to_middle = tl.where((t < j) & (j < 12), 1.0, tl.where((j >= 12) & (j <= t), -1.0, 0.0))
        R = token_sums(to_row, w, PREC) * LOG2E
        c2 = tl.exp2(token_sums(to_middle, w, PREC) * LOG2E)
        pre = tl.sum(tl.where(t == 11, eq, 0.0), 0)
        post = tl.exp2(tl.sum(tl.where(t == 15, R, 0.0), 0))
        return (tl.exp2(R), tl.exp2(R - g), tl.where(t < 8, tl.exp2(-R), 0.0), c2, eq, ea), pre, post
    else:
        c = tl.exp2(-G)
        total = tl.sum(tl.where(t == 15, eq, 0.0), 0)
        return (eq, ea, c, c, eq, ea), total, total


@triton.jit
def scanned_factors(w, ANY: tl.constexpr):
    """As `factors`, by scans and sums, which are shorter with two warps.

    With ``ANY`` these are exponentials of differences of large sums from the chunk's start, each good to 1e-5; the error cancels in every product of two of
    them, which is all that a forward makes.
    """
    t = tl.arange(0, 16)[:, None]
    g = w.to(tl.float32) * LOG2E
    G = tl.cumsum(g, 0)
    Gx = G - g
    eq, ea = tl.exp2(G), tl.exp2(Gx)
    if ANY:
        g1 = tl.sum(tl.where(t < 4, g, 0.0), 0)[None, :]
        g2, total = tl.sum(tl.where(t < 12, g, 0.0), 0), tl.sum(g, 0)
        own = tl.where(t < 8, g1, g2[None, :])
        c1 = tl.where(t < 8, tl.exp2(tl.where(t < 8, g1 - G, 0.0)), 0.0)
        return (
            (tl.exp2(G - own), tl.exp2(Gx - own), c1, tl.exp2(g2[None, :] - G), eq, ea),
            tl.exp2(g2),
            tl.exp2(total - g2),
        )
    else:
        c, total = tl.exp2(-G), tl.exp2(tl.sum(g, 0))
        return (eq, ea, c, c, eq, ea), total, total


@triton.jit
def score(rows, cols1, cols2, mask, PREC: tl.constexpr, ANY: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns."""
    A = tl.dot(rows, tl.trans(cols2), input_precision=PREC)
    if ANY:
        lo = tl.arange(0, 16)[:, None] < 8
        A = tl.where(lo, tl.dot(rows, tl.trans(cols1), input_precision=PREC), A)
    return tl.where(mask, A, 0.0)
