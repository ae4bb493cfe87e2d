"""RWKV-7, chunked forward in Triton: one program walks the chunks of one stretch of tokens, head and block of
values with the state in registers.

With G the log decays summed from the chunk's start (inclusive; Gx exclusive) and S [V, K] the state,
``U = T (A' S + A_ak V)``, ``Y = Q S + A_qk V + A_qb U``, ``S <- (S pre + V^T K + U^T B) post``
(docs/maths.md, section 3, derives it untransposed). The state is held as [V, K] so that it, V, U and Y are
left operands or accumulators of every product and never leave the registers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    Index,
    batched16_mask,
    causal_masks,
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
from ..common.decay import decay_factors
from ..common.dots import dot
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_tokens
from .chunk_A import compute_A, load_A, store_A
from .chunk_tokens import Tokens, scaled_tokens


class Outputs(NamedTuple):
    """Where a walk writes: outputs, the last state; what is kept: states, scores, U."""

    o_: Any
    ht_: Any
    states: tuple[Any, ...]
    A_: Any
    v_new_: Any


@triton.jit
def chunk_fwd(
    tokens,
    A_,
    h0_,
    index,
    out,
    block,
    c: tl.constexpr,
    SAVE_RESIDUALS: tl.constexpr = False,
    NUM_BUFFERS: tl.constexpr = 0,
    CHUNKS_PER_STATE: tl.constexpr = 1,
    SAVE_V_NEW: tl.constexpr = False,
    HAS_H0: tl.constexpr = True,
    MAKE_O: tl.constexpr = True,
    HAS_V: tl.constexpr = True,
):
    """All chunks of one stretch, head and block of values. ``scores_`` has their scores where
    `Config.precomputed_A`.

    The state starts as it is ``GIVEN``, else as zero. Without ``READ`` there are no outputs. Without
    ``WRITE`` there is no v, and the state starts as the identity.
    """
    i_h = tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    chunk_causal, chunk_strict = causal_masks(axes)
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    if not HAS_V:
        h = tl.where(axes.value[:, None] == axes.key[None, :], state_scale(index.gate, c, False), 0.0)
    elif HAS_H0:
        h = load_state(h0_, head, tile, index.gate, c)
    else:
        h = tl.full([c.BV, c.BK], 0.0, tl.float32)
    count = tl.cdiv(split.length, C)
    h = tl.where(count > 0, h, h * state_scale(index.gate, c, True))
    offsets = token_offsets(axes, c)
    pk, pv = (split.first * c.H + i_h) * c.K, (split.first * c.H + i_h) * c.V
    if SAVE_RESIDUALS:
        buffer = state_pointers(out.states, 0, axes, c, NUM_BUFFERS)
    for n in range(0, count):
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        w = load_tokens(tokens.w_ + pk, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        r = load_tokens(tokens.r_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
        k = load_tokens(tokens.k_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32)
        a = load_tokens(tokens.a_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32)
        b = load_tokens(tokens.b_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32)
        if HAS_V:
            vt = load_tokens(tokens.v_ + pv, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(
                c.operand
            )
        decays = decay_factors(w, index.gate, c, DELTA=True, BATCHED16=True, last=n + 1 == count)
        scaled = scaled_tokens(r, k, a, b, decays, c)
        causal, strict = chunk_causal, chunk_strict
        if c.segments:
            segments = chunk_segments(index.segment_bits_, split, n)
            causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
        chunk = (split.first_chunk + n) * c.H + i_h
        if c.precomputed_A:
            A = load_A(A_, chunk, c)
        else:
            A = compute_A(scaled, causal, strict, c, MAKE_O=MAKE_O, HAS_V=HAS_V)
        qg, ag, kg, bg = scaled.r.state, scaled.a.state, scaled.k.second_half, scaled.b.second_half
        if c.segments:
            sees_h0, reaches_ht = tl.trans(tokens_seeing_h0(segments)), tokens_reaching_ht(segments)
            kg, bg = masked(kg, reaches_ht, segments), masked(bg, reaches_ht, segments)
        state = h.to(c.operand)
        if SAVE_RESIDUALS:
            at = buffer + state_offset(index, split, n, pk, c, NUM_BUFFERS, CHUNKS_PER_STATE)
            tl.store(
                at, state.to(out.states[0].dtype.element_ty), mask=tile.mask & (n % CHUNKS_PER_STATE == 0)
            )
            if not c.precomputed_A and block == 0:
                store_A(out.A_, chunk, A)
        a_read = dot(state, tl.trans(ag), c)
        if c.segments:
            a_read = masked(a_read, sees_h0, segments)
        if HAS_V:
            a_read = dot(vt, tl.trans(A.A_ak), c, a_read)
        v_new = dot(a_read.to(c.operand), tl.trans(A.A_ab_inv), c).to(c.operand)
        if SAVE_V_NEW:
            store_tokens(out.v_new_ + pv, offsets.transposed, v_new, transposed_mask(mask, axes), c.unmasked)
        if MAKE_O:
            o = dot(state, tl.trans(qg), c)
            if c.segments:
                o = masked(o, sees_h0, segments)
            if HAS_V:
                o = dot(vt, tl.trans(A.A_qk), c, o)
            o = dot(v_new, tl.trans(A.A_qb), c, o)
            store_tokens(out.o_ + pv, offsets.transposed, o, transposed_mask(mask, axes), c.unmasked)
        if c.segments:
            h = masked(h, does_h0_reach_ht(segments), segments)
        if c.unsafe_gate:
            h *= decays.decay_pre[None, :]
        if HAS_V:
            h = dot(vt, kg, c, h)
        h = dot(v_new, bg, c, h) * decays.decay_post[None, :]
        pk += C * c.H * c.K
        pv += C * c.H * c.V
    store_state(out.ht_, head, h, tile, index.gate, c)


@triton.jit
def rwkv7_fwd_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    A_,
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
    made_,
    v_new_,
    c: tl.constexpr,
    SAVE_RESIDUALS: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    CHUNKS_PER_STATE: tl.constexpr,
    SAVE_V_NEW: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences).

    ``KEEP`` stores what the backward needs: the states that enter chunks, in ``ARRAYS`` arrays
    (common/state_buffers_host.py), and the scores, where no kernel has made them; ``KEEP_U`` stores U, like
    v. Where the mode allows any decay, ``any_decay_`` [B, H] says which rows and heads need that form; the
    others take the bounded one.
    """
    block = tl.program_id(0)
    gate = load_gate(gate_, tl.program_id(2), c)
    tokens, index = (
        Tokens(r_, w_, k_, v_, a_, b_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    out = Outputs(o_, ht_, (states0_, states1_, states2_, states3_), made_, v_new_)
    if has_unsafe_gate(gate, c):
        chunk_fwd(
            tokens,
            A_,
            h0_,
            index,
            out,
            block,
            c=c,
            SAVE_RESIDUALS=SAVE_RESIDUALS,
            NUM_BUFFERS=NUM_BUFFERS,
            CHUNKS_PER_STATE=CHUNKS_PER_STATE,
            SAVE_V_NEW=SAVE_V_NEW,
        )
    else:
        chunk_fwd(
            tokens,
            A_,
            h0_,
            index,
            out,
            block,
            c=with_safe_gate(c),
            SAVE_RESIDUALS=SAVE_RESIDUALS,
            NUM_BUFFERS=NUM_BUFFERS,
            CHUNKS_PER_STATE=CHUNKS_PER_STATE,
            SAVE_V_NEW=SAVE_V_NEW,
        )
