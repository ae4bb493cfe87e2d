"""RWKV-6, chunked forward in Triton: one program walks the chunks of one stretch, head and block of values
with the state in registers.

``Y = Q S + A V`` with ``A[t, i] = sum_c r_t k_i exp(Gx_t - G_i)`` below the diagonal and ``r_t . (u k_t)`` on
it, ``S <- (S pre + V^T K) post``; the state is held as [V, K]. docs/maths.md, section 2, derives it;
common/decay.py has the decay factors.
"""

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    Index,
    batched16_mask,
    chunk_mask,
    chunk_segments,
    does_h0_reach_ht,
    has_unsafe_gate,
    in_one_segment,
    load_gate,
    load_state,
    masked,
    program_split,
    state_scale,
    state_tile,
    store_state,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
    transposed_mask,
    with_safe_gate,
)
from ..common.decay import decay_factors, masked_A, safe_gate_factors_by_cumsum
from ..common.dots import dot
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_tokens
from .chunk_tokens import Tokens, scaled_tokens


@triton.jit
def chunk_fwd(
    tokens,
    h0_,
    index,
    o_,
    ht_,
    states,
    c: tl.constexpr,
    SAVE_RESIDUALS: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
):
    """All chunks of one stretch, head and block of values."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    diagonal = axes.token[:, None] == axes.token[None, :]
    chunk_strict = axes.token[:, None] > axes.token[None, :]
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    h, count = load_state(h0_, head, tile, index.gate, c), tl.cdiv(split.length, C)
    h = tl.where(count > 0, h, h * state_scale(index.gate, c, True))
    u = tl.load(tokens.u_ + (split.row * c.H + i_h) * c.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[None, :]
    offsets = token_offsets(axes, c)
    pk, pv = (split.first * c.H + i_h) * c.K, (split.first * c.H + i_h) * c.V
    if SAVE_RESIDUALS:
        buffer = state_pointers(states, 0, axes, c, NUM_BUFFERS)
    for n in range(0, count):
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        if c.unsafe_gate:
            w = load_tokens(tokens.w_ + pk, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        else:
            w = load_tokens(tokens.w_ + pk, offsets.key, mask.key, c.unmasked)
        r = load_tokens(tokens.r_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
        k = load_tokens(tokens.k_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32)
        vt = load_tokens(tokens.v_ + pv, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(
            c.operand
        )
        last = n + 1 == count
        decays = (
            decay_factors(w, index.gate, c, DELTA=False, BATCHED16=True)
            if c.unsafe_gate
            else safe_gate_factors_by_cumsum(w, index.gate, last)
        )
        scaled = scaled_tokens(r, k, decays, c)
        strict = chunk_strict
        if c.segments:
            segments = chunk_segments(index.segment_bits_, split, n)
            strict = in_one_segment(segments, chunk_strict)
        A = masked_A(scaled.r, scaled.k, strict, c, EXCLUSIVE=1)
        A = tl.where(diagonal, tl.sum(r * u * k, 1)[:, None], A).to(c.operand)
        read, written = scaled.r.state, scaled.k.second_half
        if c.segments:
            written = masked(written, tokens_reaching_ht(segments), segments)
        state = h.to(c.operand)
        if SAVE_RESIDUALS:
            place = state_offset(index, split, n, pk, c, NUM_BUFFERS, 1)
            tl.store(buffer + place, state.to(states[0].dtype.element_ty), mask=tile.mask)
        o = dot(state, tl.trans(read), c)
        if c.segments:
            o = masked(o, tl.trans(tokens_seeing_h0(segments)), segments)
        o = dot(vt, tl.trans(A), c, o)
        if c.segments:
            h = masked(h, does_h0_reach_ht(segments), segments)
        if c.unsafe_gate:
            h *= decays.decay_pre[None, :]
        h = dot(vt, written, c, h) * decays.decay_post[None, :]
        store_tokens(o_ + pv, offsets.transposed, o, transposed_mask(mask, axes), c.unmasked)
        pk += C * c.H * c.K
        pv += C * c.H * c.V
    store_state(ht_, head, h, tile, index.gate, c)


@triton.jit
def rwkv6_fwd_kernel(
    r_,
    k_,
    v_,
    w_,
    u_,
    h0_,
    segment_bits_,
    cu_seqlens_,
    chunk_offsets_,
    gate_,
    T,
    split_len,
    o_,
    ht_,
    states0_,
    states1_,
    states2_,
    states3_,
    c: tl.constexpr,
    SAVE_RESIDUALS: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences).

    ``KEEP`` stores what the backward needs: the states that enter chunks, in ``ARRAYS`` arrays
    (common/state_buffers_host.py). Where the mode allows any decay, ``any_decay_`` [B, H] says which rows
    and heads need that form; the others take the bounded one.
    """
    gate = load_gate(gate_, tl.program_id(2), c)
    tokens, index = (
        Tokens(r_, k_, v_, w_, u_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    states = (states0_, states1_, states2_, states3_)
    if has_unsafe_gate(gate, c):
        chunk_fwd(
            tokens, h0_, index, o_, ht_, states, c=c, SAVE_RESIDUALS=SAVE_RESIDUALS, NUM_BUFFERS=NUM_BUFFERS
        )
    else:
        chunk_fwd(
            tokens,
            h0_,
            index,
            o_,
            ht_,
            states,
            c=with_safe_gate(c),
            SAVE_RESIDUALS=SAVE_RESIDUALS,
            NUM_BUFFERS=NUM_BUFFERS,
        )
