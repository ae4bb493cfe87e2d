"""RWKV-7, the scores of a chunk's pairs of tokens, and the inverse that follows from some of them.

In 16 bits the walks make them as they go. Float32 operands are two parts each, which do not fit the registers
beside a state, and every block of values would make the scores again. So in float32 a kernel makes those of
all chunks beforehand, each in a program of its own, and the walks load them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    Index,
    causal_masks,
    chunk_mask,
    chunk_segments,
    chunks_of_program,
    has_unsafe_gate,
    in_one_segment,
    load_gate,
    split_of_program,
    tile_axes,
    token_offsets,
    with_safe_gate,
)
from ..common.decay import decay_factors, masked_A
from ..common.dots import inverse16
from ..common.token_tiles import load_tokens
from .chunk_tokens import Tokens, scaled_tokens

NUM_A_TILES = tl.constexpr(4)  # of tiles in `ChunkA`


class ChunkA(NamedTuple):
    """Tiles [16, 16] of a chunk: (I - A_ab)^-1, and A_ak, A_qk, A_qb; each row sees the columns before it."""

    A_ab_inv: Any
    A_ak: Any
    A_qk: Any
    A_qb: Any


@triton.jit
def compute_A(
    scaled, causal, strict, c: tl.constexpr, MAKE_O: tl.constexpr = True, HAS_V: tl.constexpr = True
):
    """Of rows and columns at hand. Without ``READ`` none of r and without ``WRITE`` none of k is of use."""
    A_ab_inv = inverse16(masked_A(scaled.a, scaled.b, strict, c, EXCLUSIVE=1), c).to(c.operand)
    A_ak, A_qk, A_qb = A_ab_inv, A_ab_inv, A_ab_inv
    if HAS_V:
        A_ak = masked_A(scaled.a, scaled.k, strict, c, EXCLUSIVE=1).to(c.operand)
        if MAKE_O:
            A_qk = masked_A(scaled.r, scaled.k, causal, c, EXCLUSIVE=0).to(c.operand)
    if MAKE_O:
        A_qb = masked_A(scaled.r, scaled.b, causal, c, EXCLUSIVE=0).to(c.operand)
    return ChunkA(A_ab_inv, A_ak, A_qk, A_qb)


@triton.jit
def tile_offsets():
    """Where the elements of a tile [16, 16] lie."""
    return tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def load_A(A_, chunk, c: tl.constexpr):
    """The scores of ``chunk``, counted through chunks and heads."""
    at, size = A_ + chunk * (NUM_A_TILES * C * C) + tile_offsets(), C * C
    A_ab_inv, A_ak, A_qk, A_qb = (
        tl.load(at),
        tl.load(at + size),
        tl.load(at + 2 * size),
        tl.load(at + 3 * size),
    )
    return ChunkA(A_ab_inv.to(c.operand), A_ak.to(c.operand), A_qk.to(c.operand), A_qb.to(c.operand))


@triton.jit
def store_A(A_, chunk, scores):
    """Stores what `load_A` loads."""
    at, size = A_ + chunk * (NUM_A_TILES * C * C) + tile_offsets(), C * C
    tl.store(at, scores.A_ab_inv.to(A_.dtype.element_ty))
    tl.store(at + size, scores.A_ak.to(A_.dtype.element_ty))
    tl.store(at + 2 * size, scores.A_qk.to(A_.dtype.element_ty))
    tl.store(at + 3 * size, scores.A_qb.to(A_.dtype.element_ty))


@triton.jit
def store_scores(tokens, index, chunk_indices_, A_, c: tl.constexpr):
    """The scores of one chunk, summed up over blocks of ``mode.BK`` keys."""
    i_h = tl.program_id(1)
    split, n = chunks_of_program(tl.program_id(0), chunk_indices_, index, 1, c)
    if split.length > n * C:
        pk = ((split.first + n * C) * c.H + i_h) * c.K
        axes = tile_axes(0, 0, c)
        causal, strict = causal_masks(axes)
        if c.segments:
            segments = chunk_segments(index.segment_bits_, split, n)
            causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
        A_ab, A_ak = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        A_qk, A_qb = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for block in range(0, tl.cdiv(c.K, c.BK)):
            axes = tile_axes(block, 0, c)
            offsets, mask = token_offsets(axes, c), chunk_mask(split.length - n * C, axes)
            w = load_tokens(tokens.w_ + pk, offsets.key, mask.key, c.unmasked)
            r = load_tokens(tokens.r_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
            k = load_tokens(tokens.k_ + pk, offsets.key, mask.key, c.unmasked)
            a = load_tokens(tokens.a_ + pk, offsets.key, mask.key, c.unmasked)
            b = load_tokens(tokens.b_ + pk, offsets.key, mask.key, c.unmasked)
            scaled = scaled_tokens(r, k, a, b, decay_factors(w, index.gate, c, DELTA=True), c)
            A_ab += masked_A(scaled.a, scaled.b, strict, c, EXCLUSIVE=1)
            A_ak += masked_A(scaled.a, scaled.k, strict, c, EXCLUSIVE=1)
            A_qk += masked_A(scaled.r, scaled.k, causal, c, EXCLUSIVE=0)
            A_qb += masked_A(scaled.r, scaled.b, causal, c, EXCLUSIVE=0)
        store_A(A_, (split.first_chunk + n) * c.H + i_h, ChunkA(inverse16(A_ab, c), A_ak, A_qk, A_qb))


@triton.jit
def rwkv7_chunk_A_kernel(
    r_,
    w_,
    k_,
    a_,
    b_,
    segment_bits_,
    cu_seqlens_,
    chunk_offsets_,
    gate_,
    chunk_indices_,
    T,
    split_len,
    A_,
    c: tl.constexpr,
):
    """Grid (chunks, heads, stretches), see `chunks_of_program`: ``scores_`` [rows, chunks, H, 4, 16, 16]
    float32, as `load_A` loads them.
    """
    gate = load_gate(gate_, split_of_program(tl.program_id(0), chunk_indices_, c), c)
    tokens, index = (
        Tokens(r_, w_, k_, k_, a_, b_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )  # without values
    if has_unsafe_gate(gate, c):
        store_scores(tokens, index, chunk_indices_, A_, c=c)
    else:
        store_scores(tokens, index, chunk_indices_, A_, c=with_safe_gate(c))
