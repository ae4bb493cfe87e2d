"""RWKV-7: the A matrices of a chunk, [16, 16], and the inverse that follows from A_ab.

With 16-bit inputs the scans compute A as they go. Float32 operands are two TF32 parts each, which do not fit
the registers beside a state, and every block of values would compute A again. So in float32 a kernel
computes A of all chunks first, each in its own program.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import (
    C,
    causal_masks,
    chunk_mask,
    chunk_segments,
    chunks_of_program,
    in_one_segment,
    split_of_program,
    tile_axes,
    token_offsets,
)
from ..common.chunk_config import with_safe_gate
from ..common.decay import decay_factors, masked_A
from ..common.dots import inverse16
from ..common.gate import has_unsafe_gate, load_gate
from ..common.token_tiles import load_tokens
from .chunk_tokens import scaled_tokens

NUM_A_TILES = tl.constexpr(4)  # of tiles in `ChunkA`


class ChunkA(NamedTuple):
    """Tiles [16, 16] of a chunk: (I - A_ab)^-1, A_ak, A_qk and A_qb, each masked to the past."""

    A_ab_inv: Tensor
    A_ak: Tensor
    A_qk: Tensor
    A_qb: Tensor


@triton.jit
def compute_A(
    scaled, causal, strict, c: tl.constexpr, MAKE_O: tl.constexpr = True, HAS_V: tl.constexpr = True
):
    """A of a chunk. Without ``MAKE_O`` A_qk and A_qb are undefined, without ``HAS_V`` A_ak and A_qk."""
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
    """Offsets of a tile [16, 16]."""
    return tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def load_A(A, chunk, c: tl.constexpr):
    """A of ``chunk``, counted through chunks and heads."""
    at, size = A + chunk * (NUM_A_TILES * C * C) + tile_offsets(), C * C
    A_ab_inv, A_ak, A_qk, A_qb = (
        tl.load(at),
        tl.load(at + size),
        tl.load(at + 2 * size),
        tl.load(at + 3 * size),
    )
    return ChunkA(A_ab_inv.to(c.operand), A_ak.to(c.operand), A_qk.to(c.operand), A_qb.to(c.operand))


@triton.jit
def store_A(A, chunk, tiles):
    """Stores what `load_A` loads."""
    at, size = A + chunk * (NUM_A_TILES * C * C) + tile_offsets(), C * C
    tl.store(at, tiles.A_ab_inv.to(A.dtype.element_ty))
    tl.store(at + size, tiles.A_ak.to(A.dtype.element_ty))
    tl.store(at + 2 * size, tiles.A_qk.to(A.dtype.element_ty))
    tl.store(at + 3 * size, tiles.A_qb.to(A.dtype.element_ty))


class AOut(NamedTuple):
    """Output of the kernel: A [rows, chunks, H, 4, 16, 16] float32, as `load_A` reads it."""

    A: Tensor


@triton.jit
def chunk_A(x, index, gate, A, c: tl.constexpr):
    """Stores A of one chunk, summed over blocks of ``BK`` keys."""
    i_h = tl.program_id(1)
    split, n = chunks_of_program(tl.program_id(0), index, c)
    if split.length > n * C:
        k_start = ((split.first + n * C) * c.H + i_h) * c.K
        axes = tile_axes(0, 0, c)
        causal, strict = causal_masks(axes)
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
        A_ab, A_ak = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        A_qk, A_qb = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for block in range(0, tl.cdiv(c.K, c.BK)):
            axes = tile_axes(block, 0, c)
            offsets, mask = token_offsets(axes, c), chunk_mask(split.length - n * C, axes)
            w = load_tokens(x.w + k_start, offsets.key, mask.key, c.unmasked)
            r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
            k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked)
            a = load_tokens(x.a + k_start, offsets.key, mask.key, c.unmasked)
            b = load_tokens(x.b + k_start, offsets.key, mask.key, c.unmasked)
            scaled = scaled_tokens(r, k, a, b, decay_factors(w, gate, c, DELTA=True), c)
            A_ab += masked_A(scaled.a, scaled.b, strict, c, EXCLUSIVE=1)
            A_ak += masked_A(scaled.a, scaled.k, strict, c, EXCLUSIVE=1)
            A_qk += masked_A(scaled.r, scaled.k, causal, c, EXCLUSIVE=0)
            A_qb += masked_A(scaled.r, scaled.b, causal, c, EXCLUSIVE=0)
        store_A(A, (split.first_chunk + n) * c.H + i_h, ChunkA(inverse16(A_ab, c), A_ak, A_qk, A_qb))


@triton.jit
def rwkv7_chunk_A_kernel(x, index, out, c: tl.constexpr):
    """Grid (chunks, heads, splits), see `chunks_of_program`."""
    gate = load_gate(index, split_of_program(tl.program_id(0), index, c), c)
    if has_unsafe_gate(gate, c):
        chunk_A(x, index, gate, out.A, c)
    else:
        chunk_A(x, index, gate, out.A, with_safe_gate(c))
