"""Decay factors of a chunk and the scores made with them, shared by the chunked Triton kernels.

With ``ANY = False`` (16 * |w| <= 80) exp(G) and exp(-G) from the chunk's start serve scores and state alike. With ``ANY = True`` rows refer
to the middle of their own block of 8 tokens, columns to both middles: exponents are at most 4 * |LOG_MIN|, whatever the decay.
"""

import triton
import triton.language as tl

from .common import LOG2E, token_sums


@triton.jit
def factors(w, ANY: tl.constexpr, PREC: tl.constexpr, SCAN: tl.constexpr):
    """Decay factors [16, K] of a chunk with log decays ``w``.

    ``SCAN`` sums with `tl.cumsum`, which is shorter with two warps; else with products. Returns: rows r and a for the scores; columns for the scores of rows
    0..7 and of rows 8..15 (also for the state); rows r and a for the state.
    """
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    if SCAN:
        g = w.to(tl.float32) * LOG2E
        G = tl.cumsum(g, 0)
        Gx = G - g
    else:
        G = token_sums(tl.where(j <= t, 1.0, 0.0), w, PREC) * LOG2E
        Gx = token_sums(tl.where(j < t, 1.0, 0.0), w, PREC) * LOG2E
    eq, ea = tl.exp2(G), tl.exp2(Gx)
    if ANY:
        if SCAN:
            g1 = tl.sum(tl.where(t < 4, g, 0.0), 0)[None, :]
            g2 = tl.sum(tl.where(t < 12, g, 0.0), 0)[None, :]
            ref = tl.where(t < 8, g1, g2)
        else:
            ref = token_sums(tl.where(j < tl.where(t < 8, 4, 12), 1.0, 0.0), w, PREC) * LOG2E
            g1 = ref
            g2 = token_sums(tl.where(j < 12, 1.0 + 0.0 * t, 0.0), w, PREC) * LOG2E
        c1 = tl.where(t < 8, tl.exp2(tl.where(t < 8, g1 - G, 0.0)), 0.0)
        return tl.exp2(G - ref), tl.exp2(Gx - ref), c1, tl.exp2(g2 - G), eq, ea
    else:
        c2 = tl.exp2(-G)
        return eq, ea, c2, c2, eq, ea


@triton.jit
def score(rows, cols1, cols2, mask, PREC: tl.constexpr, ANY: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns."""
    A = tl.dot(rows, tl.trans(cols2), input_precision=PREC)
    if ANY:
        lo = tl.arange(0, 16)[:, None] < 8
        A = tl.where(lo, tl.dot(rows, tl.trans(cols1), input_precision=PREC), A)
    return tl.where(mask, A, 0.0)
