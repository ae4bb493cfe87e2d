"""Decay factors of a chunk and the scores made with them, shared by the chunked Triton kernels.

With ``ANY = False`` (16 * |w| <= 80) exp(G) and exp(-G) from the chunk's start serve scores and state alike. With ``ANY = True`` rows refer
to the middle of their own block of 8 tokens, columns to both middles: exponents are at most 4 * |LOG_MIN|, whatever the decay.
"""

import triton
import triton.language as tl

from .common import LOG2E, token_sums


@triton.jit
def factors(w, ANY: tl.constexpr, PREC: tl.constexpr):
    """Decay factors [16, K] of a chunk with log decays ``w``, from products with constant triangles.

    Returns: rows r and a for the scores; columns for the scores of rows 0..7 and of rows 8..15 (also for the state); rows r and a for the state.
    """
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    G = token_sums(tl.where(j <= t, 1.0, 0.0), w, PREC) * LOG2E
    Gx = token_sums(tl.where(j < t, 1.0, 0.0), w, PREC) * LOG2E
    if ANY:
        ref = token_sums(tl.where(j < tl.where(t < 8, 4, 12), 1.0, 0.0), w, PREC) * LOG2E
        g2 = token_sums(tl.where(j < 12, 1.0 + 0.0 * t, 0.0), w, PREC) * LOG2E
        return _centred(G, Gx, ref, g2)
    else:
        return _plain(G, Gx)


@triton.jit
def scanned_factors(w, ANY: tl.constexpr):
    """As `factors`, by `tl.cumsum`, which is shorter with two warps; then the decays [K] of the state before and after a chunk's own writes."""
    t = tl.arange(0, 16)[:, None]
    g = w.to(tl.float32) * LOG2E
    G = tl.cumsum(g, 0)
    Gx = G - g
    total = tl.sum(g, 0)
    if ANY:
        g1 = tl.sum(tl.where(t < 4, g, 0.0), 0)[None, :]
        g2 = tl.sum(tl.where(t < 12, g, 0.0), 0)
        return _centred(G, Gx, tl.where(t < 8, g1, g2[None, :]), g2[None, :]), tl.exp2(g2), tl.exp2(total - g2)
    else:
        return _plain(G, Gx), tl.exp2(total), tl.exp2(total)


@triton.jit
def _plain(G, Gx):
    eq, ea, c = tl.exp2(G), tl.exp2(Gx), tl.exp2(-G)
    return eq, ea, c, c, eq, ea


@triton.jit
def _centred(G, Gx, ref, g2):
    """``ref`` is a row's own middle, ``g2`` that of rows 8..15."""
    lo = tl.arange(0, 16)[:, None] < 8
    c1 = tl.where(lo, tl.exp2(tl.where(lo, ref - G, 0.0)), 0.0)
    return tl.exp2(G - ref), tl.exp2(Gx - ref), c1, tl.exp2(g2 - G), tl.exp2(G), tl.exp2(Gx)


@triton.jit
def score(rows, cols1, cols2, mask, PREC: tl.constexpr, ANY: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns."""
    A = tl.dot(rows, tl.trans(cols2), input_precision=PREC)
    if ANY:
        lo = tl.arange(0, 16)[:, None] < 8
        A = tl.where(lo, tl.dot(rows, tl.trans(cols1), input_precision=PREC), A)
    return tl.where(mask, A, 0.0)
