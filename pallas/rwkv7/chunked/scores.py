"""RWKV-7, the scores of a chunk's pairs of tokens, and the inverse that follows from some of them.

In 16 bits the walks make them as they go. Float32 operands are two parts each, which do not fit the registers
beside a state, and every block of values would make the scores again. So in float32 a kernel makes those of
all chunks beforehand, each in a program of its own, and the walks load them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...device.chunk import (
    C,
    Ranges,
    bounded,
    causal,
    chunk_elements,
    chunk_offsets,
    chunk_segments,
    chunks_of_program,
    form_of,
    needs_any_decay,
    sequence_of_program,
    tile_axes,
    together,
)
from ...device.decay import factors, score
from ...device.products import inverse16
from ...device.tokens import load_tokens
from .tokens import Tokens, scaled_tokens

COUNT = tl.constexpr(4)  # of tiles in `Scores`


class Scores(NamedTuple):
    """Tiles [16, 16] of a chunk: (I - A_ab)^-1, and A_ak, A_qk, A_qb; each row sees the columns before it."""

    inverse: Any
    ak: Any
    qk: Any
    qb: Any


@triton.jit
def own_scores(
    scaled, seen, below, mode: tl.constexpr, READ: tl.constexpr = True, WRITE: tl.constexpr = True
):
    """Of rows and columns at hand. Without ``READ`` none of r and without ``WRITE`` none of k is of use."""
    inverse = inverse16(score(scaled.a, scaled.b, below, mode, EXCL=1), mode).to(mode.operand)
    ak, qk, qb = inverse, inverse, inverse
    if WRITE:
        ak = score(scaled.a, scaled.k, below, mode, EXCL=1).to(mode.operand)
        if READ:
            qk = score(scaled.r, scaled.k, seen, mode, EXCL=0).to(mode.operand)
    if READ:
        qb = score(scaled.r, scaled.b, seen, mode, EXCL=0).to(mode.operand)
    return Scores(inverse, ak, qk, qb)


@triton.jit
def tile_offsets():
    """Where the elements of a tile [16, 16] lie."""
    return tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def kept_scores(kept_, chunk, mode: tl.constexpr):
    """The scores of ``chunk``, counted through chunks and heads."""
    at, size = kept_ + chunk * (COUNT * C * C) + tile_offsets(), C * C
    inverse, ak, qk, qb = tl.load(at), tl.load(at + size), tl.load(at + 2 * size), tl.load(at + 3 * size)
    return Scores(inverse.to(mode.operand), ak.to(mode.operand), qk.to(mode.operand), qb.to(mode.operand))


@triton.jit
def keep_scores(kept_, chunk, scores):
    """Stores what `kept_scores` loads."""
    at, size = kept_ + chunk * (COUNT * C * C) + tile_offsets(), C * C
    tl.store(at, scores.inverse.to(kept_.dtype.element_ty))
    tl.store(at + size, scores.ak.to(kept_.dtype.element_ty))
    tl.store(at + 2 * size, scores.qk.to(kept_.dtype.element_ty))
    tl.store(at + 3 * size, scores.qb.to(kept_.dtype.element_ty))


@triton.jit
def store_scores(tokens, ranges, owner_, scores_, mode: tl.constexpr):
    """The scores of one chunk, summed up over blocks of ``mode.BK`` keys."""
    h = tl.program_id(1)
    here, n = chunks_of_program(tl.program_id(0), owner_, ranges, 1, mode)
    if here.length > n * C:
        pk = ((here.first + n * C) * mode.H + h) * mode.K
        axes = tile_axes(0, 0, mode)
        seen, below = causal(axes)
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            seen, below = together(segments, seen), together(segments, below)
        ab, ak = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        qk, qb = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for block in range(0, tl.cdiv(mode.K, mode.BK)):
            axes = tile_axes(block, 0, mode)
            offsets, there = chunk_offsets(axes, mode), chunk_elements(here.length - n * C, axes)
            w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
            r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even).to(tl.float32) * mode.scale
            k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even)
            a = load_tokens(tokens.a_ + pk, offsets.key, there.key, mode.even)
            b = load_tokens(tokens.b_ + pk, offsets.key, there.key, mode.even)
            scaled = scaled_tokens(r, k, a, b, factors(w, ranges.form, mode, DELTA=True), mode)
            ab += score(scaled.a, scaled.b, below, mode, EXCL=1)
            ak += score(scaled.a, scaled.k, below, mode, EXCL=1)
            qk += score(scaled.r, scaled.k, seen, mode, EXCL=0)
            qb += score(scaled.r, scaled.b, seen, mode, EXCL=0)
        keep_scores(scores_, (here.chunk0 + n) * mode.H + h, Scores(inverse16(ab, mode), ak, qk, qb))


@triton.jit
def rwkv7_scores_kernel(
    r_, w_, k_, a_, b_, seg_, cu_, chunk0_, any_decay_, owner_, T, span, scores_, mode: tl.constexpr
):
    """Grid (chunks, heads, stretches), see `chunks_of_program`: ``scores_`` [rows, chunks, H, 4, 16, 16]
    float32, as `kept_scores` loads them.
    """
    form = form_of(any_decay_, sequence_of_program(tl.program_id(0), owner_, mode), mode)
    tokens, ranges = (
        Tokens(r_, w_, k_, k_, a_, b_),
        Ranges(seg_, cu_, chunk0_, T, span, form),
    )  # without values
    if needs_any_decay(form, mode):
        store_scores(tokens, ranges, owner_, scores_, mode=mode)
    else:
        store_scores(tokens, ranges, owner_, scores_, mode=bounded(mode))
