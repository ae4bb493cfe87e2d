"""RWKV-7, chunked forward.

``v_new = A_ab_inv (ag h + A_ak v)``, ``o = qg h + A_qk v + A_qb v_new``,
``h <- (h decay_pre + v^T kg + v_new^T bg) decay_post``. qg, ag, kg and bg are r, a, k and b times their
decays from and to the ends of the chunk (docs/maths.md, section 3; `decay` has the factors). The state is
held as [V, K], so that it, v, v_new and o are left operands or accumulators of every product and never leave
the registers.

Grid: blocks of values, heads, splits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import (
    C,
    batched16_mask,
    causal_masks,
    chunk_mask,
    chunk_segments,
    chunk_starts,
    does_h0_reach_ht,
    in_one_segment,
    load_state,
    masked,
    program_split,
    state_tile,
    store_state,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
    transposed_mask,
)
from ..common.chunk_config import with_safe_gate
from ..common.decay import decay_factors
from ..common.dots import dot, transposed_A
from ..common.gate import has_unsafe_gate, load_gate, state_scale
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_tokens
from .chunk_A import compute_A, load_A, store_A
from .chunk_tokens import scaled_tokens


class FwdOut(NamedTuple):
    """Outputs of a scan; None for what is not wanted.

    Attributes:
        o: [B, T, H, V].
        ht: [splits, H, K, V] float32.
        states: buffers of the states at the starts of chunks (`state_buffers`).
        A: [rows, chunks, H, 4, 16, 16].
        v_new: [B, T, H, V].
    """

    o: Tensor
    ht: Tensor
    states: Tensor
    A: Tensor
    v_new: Tensor


class Scan(NamedTuple):
    """What the chunks of a scan share.

    Attributes:
        split: the tokens.
        num_chunks: its chunks.
        head: number of the program's state.
        axes, offsets, causal, strict: of a chunk's tiles.
        tile: the program's block of a state.
    """

    split: Tensor
    num_chunks: Tensor
    head: Tensor
    axes: Tensor
    offsets: Tensor
    causal: Tensor
    strict: Tensor
    tile: Tensor


@triton.jit
def scan_of(index, block, c: tl.constexpr):
    """The scan of the program's split and head and of a block of values."""
    split, axes = program_split(index, c), tile_axes(0, block, c)
    causal, strict = causal_masks(axes)
    head = (tl.program_id(2) * c.H + tl.program_id(1)).to(tl.int64)
    num_chunks = tl.cdiv(split.length, C)
    return Scan(split, num_chunks, head, axes, token_offsets(axes, c), causal, strict, state_tile(axes, c))


class ChunkTiles(NamedTuple):
    """What every state needs of a chunk.

    Attributes:
        A: `ChunkA`.
        qg, ag, kg, bg: decayed tokens [16, K], as in the formulas above.
        decays: `decay_factors`.
        vt: v transposed [V, 16], if there is a v.
        segments: `chunk_segments`, if there are segments.
    """

    A: Tensor
    qg: Tensor
    ag: Tensor
    kg: Tensor
    bg: Tensor
    decays: Tensor
    vt: Tensor
    segments: Tensor


@triton.jit
def load_chunk(x, A, index, gate, scan, n, c: tl.constexpr, MAKE_O: tl.constexpr):
    """The tiles of chunk ``n``."""
    i_h, split, axes, offsets = tl.program_id(1), scan.split, scan.axes, scan.offsets
    k_start, v_start = chunk_starts(split, n, i_h, c)
    mask = chunk_mask(split.length - n * C, axes)
    w = load_tokens(x.w + k_start, offsets.batched16, batched16_mask(mask, c), c.unmasked)
    r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
    k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32)
    a = load_tokens(x.a + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32)
    b = load_tokens(x.b + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32)
    # a Triton function cannot return None, so without v or segments a mask is returned in their place
    vt, segments = scan.causal, scan.causal
    if x.v is not None:
        vt = load_tokens(x.v + v_start, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(
            c.operand
        )
    decays = decay_factors(w, gate, c, DELTA=True, BATCHED16=True, last=n + 1 == scan.num_chunks)
    scaled = scaled_tokens(r, k, a, b, decays, c)
    causal, strict = scan.causal, scan.strict
    if c.segments:
        segments = chunk_segments(index.segment_bits, split, n)
        causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
    if c.precomputed_A:
        tiles = load_A(A, (split.first_chunk + n) * c.H + i_h, c)
    else:
        tiles = compute_A(scaled, causal, strict, c, MAKE_O=MAKE_O, HAS_V=x.v is not None)
    kg, bg = scaled.k.second_half, scaled.b.second_half
    if c.segments:
        reaches_ht = tokens_reaching_ht(segments)
        kg, bg = masked(kg, reaches_ht, segments), masked(bg, reaches_ht, segments)
    return ChunkTiles(tiles, scaled.r.state, scaled.a.state, kg, bg, decays, vt, segments)


@triton.jit
def written_values(state, chunk, c: tl.constexpr, HAS_V: tl.constexpr):
    """v_new of a chunk, transposed, from the state before it."""
    a_read = dot(state, tl.trans(chunk.ag), c)
    if c.segments:
        a_read = masked(a_read, tl.trans(tokens_seeing_h0(chunk.segments)), chunk.segments)
    if HAS_V:
        a_read = dot(chunk.vt, transposed_A(chunk.A.A_ak, c), c, a_read)
    return dot(a_read.to(c.operand), transposed_A(chunk.A.A_ab_inv, c), c).to(c.operand)


@triton.jit
def chunk_output(state, v_new, chunk, c: tl.constexpr, HAS_V: tl.constexpr):
    """o of a chunk, transposed."""
    o = dot(state, tl.trans(chunk.qg), c)
    if c.segments:
        o = masked(o, tl.trans(tokens_seeing_h0(chunk.segments)), chunk.segments)
    if HAS_V:
        o = dot(chunk.vt, transposed_A(chunk.A.A_qk, c), c, o)
    return dot(v_new, transposed_A(chunk.A.A_qb, c), c, o)


@triton.jit
def next_state(h, v_new, chunk, c: tl.constexpr, HAS_V: tl.constexpr):
    """The state after a chunk."""
    if c.segments:
        h = masked(h, does_h0_reach_ht(chunk.segments), chunk.segments)
    if c.unsafe_gate:
        h *= chunk.decays.decay_pre[None, :]
    if HAS_V:
        h = dot(chunk.vt, chunk.kg, c, h)
    return dot(v_new, chunk.bg, c, h) * chunk.decays.decay_post[None, :]


@triton.jit
def store_values(ptr, scan, n, tile, c: tl.constexpr):
    """Stores a transposed tile [V, 16] of chunk ``n``; ``ptr`` points to the chunk's first token."""
    mask = transposed_mask(chunk_mask(scan.split.length - n * C, scan.axes), scan.axes)
    store_tokens(ptr, scan.offsets.transposed, tile, mask, c.unmasked)


@triton.jit
def scan_chunks(x, A, index, gate, out, scan, block, h, first, last, c: tl.constexpr):
    """The state after the chunks from ``first`` to before ``last``, from the state ``h`` before them.

    Without ``x.v`` only v_new writes to the state. ``A`` are the A matrices of all chunks, where
    `Config.precomputed_A`. ``h`` is scaled by `state_scale`, and so is the result, but not after the
    split's last chunk.
    """
    i_h, split = tl.program_id(1), scan.split
    HAS_V: tl.constexpr = x.v is not None
    if out.states is not None:
        buffer = state_pointers(out.states, 0, scan.axes, c.num_buffers, c)
    for n in range(first, last):
        k_start, v_start = chunk_starts(split, n, i_h, c)
        chunk = load_chunk(x, A, index, gate, scan, n, c, MAKE_O=out.o is not None)
        state = h.to(c.operand)
        if out.states is not None:
            at = buffer + state_offset(index, split, n, k_start, c.num_buffers, c)
            tl.store(
                at,
                state.to(out.states[0].dtype.element_ty),
                mask=scan.tile.mask & (n % c.chunks_per_state == 0),
            )
            if out.A is not None and block == 0:
                store_A(out.A, (split.first_chunk + n) * c.H + i_h, chunk.A)
        v_new = written_values(state, chunk, c, HAS_V)
        if out.v_new is not None:
            store_values(out.v_new + v_start, scan, n, v_new, c)
        if out.o is not None:
            o = chunk_output(state, v_new, chunk, c, HAS_V)
            store_values(out.o + v_start, scan, n, o, c)
        h = next_state(h, v_new, chunk, c, HAS_V)
    return h


@triton.jit
def chunk_fwd(x, A, index, gate, out, block, c: tl.constexpr):
    """Scans all chunks of a split, for one head and block of values."""
    scan = scan_of(index, block, c)
    h = load_state(x.initial_state, scan.head, scan.tile, gate, c)
    h = tl.where(scan.num_chunks > 0, h, h * state_scale(gate, c, True))
    h = scan_chunks(x, A, index, gate, out, scan, block, h, 0, scan.num_chunks, c)
    store_state(out.ht, scan.head, h, scan.tile, gate, c)


@triton.jit
def rwkv7_fwd_kernel(x, A, index, out, c: tl.constexpr):
    """``x`` are the op's inputs with the states at the starts of splits."""
    block, gate = tl.program_id(0), load_gate(index, tl.program_id(2), c)
    if has_unsafe_gate(gate, c):
        chunk_fwd(x, A, index, gate, out, block, c)
    else:
        chunk_fwd(x, A, index, gate, out, block, with_safe_gate(c))
