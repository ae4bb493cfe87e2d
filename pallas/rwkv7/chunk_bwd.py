"""RWKV-7, chunked backward in Triton: one program walks the chunks of one stretch, head and block of values
in reverse, the state's gradient in registers.

States and scores come from the forward; everything else is computed again. With
dS the gradient of the state that leaves the chunk, ``dU = A_qb^T dY + B' dS``, ``dZ = T^T dU``,
``dV = A_qk^T dY + K' dS + A_ak^T dZ``, ``dA = (dY, dZ) (V, U)^T``; then rows and columns (docs/maths.md,
section 5). All value-sided tiles are held transposed, [V, 16], as in the forward.

Heads of 65 to 128 numbers, in float32 all up to 128, take two kernels, for their tiles do not fit the
registers at once: the carry kernel walks only what the next chunk needs (dS, and dV and dZ with it), with
values split over programs, and stores dS, in 16 bits of every second chunk; chunk_bwd_split.py (two chunks)
and chunk_bwd_split_one.py then have programs for these and blocks of keys.
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
    cotangent_scale,
    does_h0_reach_ht,
    has_unsafe_gate,
    in_one_segment,
    load_gate,
    load_state,
    partial_sums,
    program_split,
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
from ..common.state_buffers import aliased_gradients, state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_gradient, store_tokens, where_or_zero
from .chunk_A import load_A
from .chunk_bwd_grads import Masks, TokenTiles, Values, score_gradients, token_gradients
from .chunk_bwd_key_major import chunk_bwd_key_major
from .chunk_tokens import Tokens, advanced, scaled_tokens


class Saved(NamedTuple):
    """What the backward reads besides tokens: cotangents of outputs and last state, kept states, scores."""

    do_: Any
    dht_: Any
    states: tuple[Any, ...]
    A_: Any


class Grads(NamedTuple):
    """Where a walk writes: gradients of tokens, of the first state, of states that leave chunks, dZ."""

    tokens: Tokens
    dh0_: Any
    dstates: tuple[Any, ...]
    da_read_: Any


@triton.jit
def chunk_bwd(
    tokens,
    index,
    saved,
    out,
    c: tl.constexpr,
    FUSED: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    CHUNKS_PER_STATE: tl.constexpr = 1,
):
    """All chunks of one stretch, head and block of values, from the last to the first.

    With ``FUSED`` it makes all gradients, without only dV, dZ and the states' gradients, one for ``EVERY``
    chunks.
    """
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    chunk_causal, chunk_strict = causal_masks(axes)
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    dh = load_state(saved.dht_, head, tile, index.gate, c, GRADIENT=True)
    if c.unsafe_gate:
        do_scale, grad_scale = cotangent_scale(index.gate)
    else:
        grad_scale = 1.0
    offsets = token_offsets(axes, c)
    count = tl.cdiv(split.length, C)
    pk = ((split.first + (count - 1) * C) * c.H + i_h) * c.K
    pv = ((split.first + (count - 1) * C) * c.H + i_h) * c.V
    part = partial_sums(block, index.T, c)
    if FUSED:
        buffer = state_pointers(saved.states, 0, axes, c, NUM_BUFFERS)
    else:
        buffer = state_pointers(out.dstates, block, axes, c, NUM_BUFFERS)
    for i in range(0, count):
        n = count - 1 - i
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        chunk = (split.first_chunk + n) * c.H + i_h
        if FUSED:
            w = load_tokens(tokens.w_ + pk, offsets.key, mask.key, c.unmasked)
        else:
            w = load_tokens(tokens.w_ + pk, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        r = load_tokens(tokens.r_ + pk, offsets.key, mask.key, c.unmasked)
        k = load_tokens(tokens.k_ + pk, offsets.key, mask.key, c.unmasked)
        a = load_tokens(tokens.a_ + pk, offsets.key, mask.key, c.unmasked)
        b = load_tokens(tokens.b_ + pk, offsets.key, mask.key, c.unmasked)
        if FUSED:
            do = load_tokens(saved.do_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand)
            do_t = tl.trans(do)
            v = load_tokens(tokens.v_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand)
            at = buffer + state_offset(index, split, n, pk, c, NUM_BUFFERS, CHUNKS_PER_STATE)
            h = tl.load(at, mask=tile.mask, other=0.0).to(c.operand)
        else:
            do_t = load_tokens(
                saved.do_ + pv, offsets.transposed, transposed_mask(mask, axes), c.unmasked
            ).to(c.operand)
        A = load_A(saved.A_, chunk, c)
        decays = decay_factors(w, index.gate, c, DELTA=True, BATCHED16=not FUSED)
        scaled = scaled_tokens(r.to(tl.float32) * c.scale, k, a, b, decays, c)
        causal, strict = chunk_causal, chunk_strict
        qg, ag, kg, bg = scaled.r.state, scaled.a.state, scaled.k.second_half, scaled.b.second_half
        if c.segments:
            segments = chunk_segments(index.segment_bits_, split, n)
            causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
            sees_h0, reaches_ht = tokens_seeing_h0(segments), tokens_reaching_ht(segments)
            qg, ag = where_or_zero(qg, sees_h0), where_or_zero(ag, sees_h0)
            kg, bg = where_or_zero(kg, reaches_ht), where_or_zero(bg, reaches_ht)
        else:
            sees_h0, reaches_ht = mask.token[:, None], mask.token[:, None]
        if c.unsafe_gate:
            do_t *= do_scale.to(c.operand)
        dh *= decays.decay_post[None, :]  # now the gradient of S pre + V^T K + U^T B
        dstate = dh.to(c.operand)
        dv_new = dot(do_t, A.A_qb, c)
        dv_new = dot(dstate, tl.trans(bg), c, dv_new)
        da_read = dot(dv_new.to(c.operand), A.A_ab_inv, c).to(c.operand)
        dV = dot(do_t, A.A_qk, c)
        dV = dot(dstate, tl.trans(kg), c, dV)
        dV = dot(da_read, A.A_ak, c, dV)
        store_gradient(out.tokens.v_ + pv, offsets.transposed, dV, grad_scale, transposed_mask(mask, axes), c)
        if FUSED:
            a_read = dot(h, tl.trans(ag), c)
            a_read = dot(tl.trans(v), tl.trans(A.A_ak), c, a_read)
            v_new = dot(a_read.to(c.operand), tl.trans(A.A_ab_inv), c).to(c.operand)
        else:
            store_tokens(
                out.da_read_ + pv, offsets.transposed, da_read, transposed_mask(mask, axes), c.unmasked
            )
            at = buffer + state_offset(index, split, n, pk, c, NUM_BUFFERS, CHUNKS_PER_STATE)
            last = ((n + 1) % CHUNKS_PER_STATE == 0) | (i == 0)
            tl.store(at, dstate.to(out.dstates[0].dtype.element_ty), mask=tile.mask & last)
        # the state that passes through
        if c.unsafe_gate:
            dh *= decays.decay_pre[None, :]
        if c.segments:
            dh = tl.where(does_h0_reach_ht(segments), dh, 0.0)
        if FUSED:
            at, values = part + pk, Values(v, do, v_new, da_read)
            token_gradients(
                TokenTiles(r, k, a, b),
                decays,
                scaled,
                qg,
                ag,
                Masks(causal, strict, sees_h0, reaches_ht),
                score_gradients(values, index.gate, c),
                values,
                h,
                dstate,
                dg_pass=tl.sum(h.to(tl.float32) * dh, 0),
                gradients=advanced(out.tokens, at),
                gate=index.gate,
                offsets=offsets.key,
                mask=mask.key,
                c=c,
            )
        dh = dot(do_t, qg, c, dh)
        dh = dot(da_read, ag, c, dh)
        pk -= C * c.H * c.K
        pv -= C * c.H * c.V
    store_state(out.dh0_, head, dh, tile, index.gate, c, GRADIENT=True)


@triton.jit
def rwkv7_bwd_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    segment_bits_,
    cu_seqlens_,
    chunk_offsets_,
    gate_,
    do_,
    dht_,
    states0_,
    states1_,
    states2_,
    states3_,
    A_,
    T,
    split_len,
    dr_,
    dw_,
    dk_,
    dv_,
    da_,
    db_,
    dh0_,
    c: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    NUM_ALIASED: tl.constexpr,
    KEY_MAJOR: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences); ``any_decay_`` as in the forward.
    ``KEYS_AS_ROWS`` takes both forms from chunk_bwd_key_major.py.

    dr, dw, dk, da, db have a leading axis of value blocks, to be summed.
    """
    gate = load_gate(gate_, tl.program_id(2), c)
    tokens, index = (
        Tokens(r_, w_, k_, v_, a_, b_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    states = (states0_, states1_, states2_, states3_)
    dr_, dk_, da_, db_ = aliased_gradients(states, (dr_, dk_, da_, db_), NUM_ALIASED)
    saved = Saved(do_, dht_, states, A_)
    out = Grads(Tokens(dr_, dw_, dk_, dv_, da_, db_), dh0_, (dh0_,), dh0_)  # the last two are not written
    if KEY_MAJOR:
        if has_unsafe_gate(gate, c):
            chunk_bwd_key_major(tokens, index, saved, out, c=c, NUM_BUFFERS=NUM_BUFFERS)
        else:
            chunk_bwd_key_major(tokens, index, saved, out, c=with_safe_gate(c), NUM_BUFFERS=NUM_BUFFERS)
    elif has_unsafe_gate(gate, c):
        chunk_bwd(tokens, index, saved, out, c=c, FUSED=True, NUM_BUFFERS=NUM_BUFFERS)
    else:
        chunk_bwd(tokens, index, saved, out, c=with_safe_gate(c), FUSED=True, NUM_BUFFERS=NUM_BUFFERS)


@triton.jit
def rwkv7_bwd_dh_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    segment_bits_,
    cu_seqlens_,
    chunk_offsets_,
    gate_,
    do_,
    dht_,
    A_,
    T,
    split_len,
    dv_,
    dh0_,
    dstates0_,
    dstates1_,
    dstates2_,
    dstates3_,
    da_read_,
    c: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    CHUNKS_PER_STATE: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences): dV, dZ like it, and the gradients of the
    states that leave every ``EVERY`` chunks, before their last decay, where common/state_buffers.py has them.
    """
    gate = load_gate(gate_, tl.program_id(2), c)
    tokens, index = (
        Tokens(r_, w_, k_, v_, a_, b_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    saved = Saved(do_, dht_, (A_,), A_)
    dstates = (dstates0_, dstates1_, dstates2_, dstates3_)
    out = Grads(Tokens(dv_, dv_, dv_, dv_, dv_, dv_), dh0_, dstates, da_read_)  # of tokens only dv is written
    if has_unsafe_gate(gate, c):
        chunk_bwd(
            tokens,
            index,
            saved,
            out,
            c=c,
            FUSED=False,
            NUM_BUFFERS=NUM_BUFFERS,
            CHUNKS_PER_STATE=CHUNKS_PER_STATE,
        )
    else:
        chunk_bwd(
            tokens,
            index,
            saved,
            out,
            c=with_safe_gate(c),
            FUSED=False,
            NUM_BUFFERS=NUM_BUFFERS,
            CHUNKS_PER_STATE=CHUNKS_PER_STATE,
        )
