"""RWKV-6, chunked backward in Triton: one program walks the chunks of one stretch, head and block of values
in reverse, the state's gradient in registers.

``dV = A^T dY + K' dS``, ``dA = dY V^T``, then rows and columns through the pairs of the chunk and through the
states at its ends (docs/maths.md, section 5). Value-sided tiles are held transposed, [V, 16].

The gradient of the log decay adds only terms that contain the decay in question (section 6 there). A pair of
neighbours (t, t - 1) is not decayed at all and belongs to none: in the form for any decay it is taken apart,
so that its size cannot drown the others.
"""

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    Index,
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
from ..common.decay import decay_factors, in_first_half, masked_A
from ..common.dots import dot, token_sums_f32
from ..common.state_buffers import aliased_gradients, state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_gradient, where_or_zero
from .chunk_bwd_key_major import chunk_bwd_key_major
from .chunk_tokens import Tokens, scaled_tokens


@triton.jit
def chunk_bwd(tokens, index, do_, dht_, states, gradients, dh0_, c: tl.constexpr, NUM_BUFFERS: tl.constexpr):
    """All chunks of one stretch, head and block of values, from the last to the first."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    t, j = axes.token[:, None], axes.token[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    dh = load_state(dht_, head, tile, index.gate, c, GRADIENT=True)
    u = tl.load(tokens.u_ + (split.row * c.H + i_h) * c.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[None, :]
    du = tl.full([c.BK], 0.0, tl.float32)
    if c.unsafe_gate:
        do_scale, grad_scale = cotangent_scale(index.gate)
    else:
        grad_scale = 1.0
    offsets = token_offsets(axes, c)
    count = tl.cdiv(split.length, C)
    pk = ((split.first + (count - 1) * C) * c.H + i_h) * c.K
    pv = ((split.first + (count - 1) * C) * c.H + i_h) * c.V
    part = partial_sums(block, index.T, c)
    buffer = state_pointers(states, 0, axes, c, NUM_BUFFERS)
    for i in range(0, count):
        n = count - 1 - i
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        w = load_tokens(tokens.w_ + pk, offsets.key, mask.key, c.unmasked)
        r = load_tokens(tokens.r_ + pk, offsets.key, mask.key, c.unmasked)
        k = load_tokens(tokens.k_ + pk, offsets.key, mask.key, c.unmasked)
        v = load_tokens(tokens.v_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand)
        do = load_tokens(do_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand)
        place = state_offset(index, split, n, pk, c, NUM_BUFFERS, 1)
        h = tl.load(buffer + place, mask=tile.mask, other=0.0).to(c.operand)
        if c.unsafe_gate:
            do *= do_scale.to(c.operand)
        decays = decay_factors(w, index.gate, c, DELTA=False)
        rf, kf = r.to(tl.float32) * c.scale, k.to(tl.float32)
        scaled = scaled_tokens(rf, kf, decays, c)
        strict = t > j
        read, written = scaled.r.state, scaled.k.second_half
        if c.segments:
            segments = chunk_segments(index.segment_bits_, split, n)
            strict = in_one_segment(segments, strict)
            sees_h0, reaches_ht = tokens_seeing_h0(segments), tokens_reaching_ht(segments)
            read, written = where_or_zero(read, sees_h0), where_or_zero(written, reaches_ht)
        A = masked_A(scaled.r, scaled.k, strict, c, EXCLUSIVE=1)
        A = tl.where(t == j, tl.sum(rf * u * kf, 1)[:, None], A).to(c.operand)
        vt, do_t = tl.trans(v), tl.trans(do)
        dh *= decays.decay_post[None, :]  # now the gradient of S pre + V^T K
        dstate = dh.to(c.operand)
        dV = dot(do_t, A, c)
        dV = dot(dstate, tl.trans(written), c, dV)
        store_gradient(gradients.v_ + pv, offsets.transposed, dV, grad_scale, transposed_mask(mask, axes), c)

        dA = dot(do, vt, c)
        own = tl.sum(where_or_zero(dA, t == j), 1)[:, None]  # dY_t . V_t
        dA = where_or_zero(dA, strict)
        undecayed_pairs = where_or_zero(dA, t == j + 1).to(c.operand)
        if c.unsafe_gate:
            dA = where_or_zero(dA, t > j + 1)
        dA = dA.to(c.operand)
        # rows, then columns: through the state, and with the pairs of the chunk
        by_state = dot(do, h, c)
        if c.segments:
            by_state = where_or_zero(by_state, sees_h0)
        by_pairs = dot(dA, scaled.k.second_half, c)
        if c.unsafe_gate:
            by_pairs = tl.where(in_first_half(t, 1), dot(dA, scaled.k.first_half, c), by_pairs)
        reads, row_terms = read.to(tl.float32) * by_state, scaled.r.score.to(tl.float32) * by_pairs
        if not c.unsafe_gate:
            row_terms = reads + row_terms
        dr = (decays.state_ge * by_state + decays.score_ge * by_pairs) * c.scale
        dr += own * (u * kf * c.scale)
        if c.unsafe_gate:
            dr += dot(undecayed_pairs, k.to(c.operand), c) * c.scale
        store_gradient(gradients.r_ + part + pk, offsets.key, dr, grad_scale, mask.key, c)
        by_state = dot(v, dstate, c)
        if c.segments:
            by_state = where_or_zero(by_state, reaches_ht)
        dg_state = scaled.k.second_half.to(tl.float32) * by_state
        dA_high = tl.where(in_first_half(t, 1), 0.0, dA).to(dA.dtype) if c.unsafe_gate else dA
        by_pairs = dot(tl.trans(dA_high), scaled.r.score, c)
        column_terms = scaled.k.second_half.to(tl.float32) * by_pairs
        dk = decays.second_half * (by_state + by_pairs) + own * u * rf
        if c.unsafe_gate:
            by_pairs = dot(tl.trans(where_or_zero(dA, in_first_half(t, 1))), scaled.r.score, c)
            column_terms += scaled.k.first_half.to(tl.float32) * by_pairs
            dk_low = decays.first_half * by_pairs
            undecayed = dot(tl.trans(undecayed_pairs), r.to(c.operand), c)
            dk += dk_low + undecayed * c.scale
        store_gradient(gradients.k_ + part + pk, offsets.key, dk, grad_scale, mask.key, c)
        du += tl.sum(own * rf * kf, 0)

        # the state that passes through
        if c.unsafe_gate:
            dh *= decays.decay_pre[None, :]
        if c.segments:
            dh = tl.where(does_h0_reach_ht(segments), dh, 0.0)
        dg = tl.full([C, c.BK], 0.0, tl.float32) + tl.sum(h.to(tl.float32) * dh, 0)[None, :]
        if c.unsafe_gate:
            # what has clamped factors gets the true one of the decay in question back
            exact = token_sums_f32(later, reads, dg, c)
            dg = token_sums_f32(later, row_terms - column_terms, -column_terms, c)
            dg = exact + decays.clamp_ratio * token_sums_f32(earlier, dg_state, dg, c)
        else:
            dg = token_sums_f32(from_here, row_terms - column_terms, dg - row_terms, c)
            dg = token_sums_f32(earlier, dg_state, dg, c)
        store_gradient(gradients.w_ + part + pk, offsets.key, dg, grad_scale, mask.key, c)
        dh = dot(do_t, read, c, dh)
        pk -= C * c.H * c.K
        pv -= C * c.H * c.V
    if c.unsafe_gate:
        du *= grad_scale
    store_state(dh0_, head, dh, tile, index.gate, c, GRADIENT=True)
    at_du = ((block * tl.num_programs(2) + tl.program_id(2)) * c.H + i_h) * c.K
    tl.store(gradients.u_ + at_du + axes.key, du, mask=axes.has_key)


@triton.jit
def rwkv6_bwd_kernel(
    r_,
    k_,
    v_,
    w_,
    u_,
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
    T,
    split_len,
    dr_,
    dk_,
    dv_,
    dw_,
    du_,
    dh0_,
    c: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    NUM_ALIASED: tl.constexpr,
    KEY_MAJOR: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences); ``any_decay_`` as in the forward.
    ``KEYS_AS_ROWS`` takes both forms from chunk_bwd_key_major.py.

    dr, dk, dw have a leading axis of value blocks and du those of value blocks and stretches, to be summed.
    """
    gate = load_gate(gate_, tl.program_id(2), c)
    tokens, index = (
        Tokens(r_, k_, v_, w_, u_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    states = (states0_, states1_, states2_, states3_)
    dr_, dk_, dv_, dw_ = aliased_gradients(states, (dr_, dk_, dv_, dw_), NUM_ALIASED)
    gradients = Tokens(dr_, dk_, dv_, dw_, du_)
    if KEY_MAJOR:
        if has_unsafe_gate(gate, c):
            chunk_bwd_key_major(tokens, index, do_, dht_, states, gradients, dh0_, c, NUM_BUFFERS)
        else:
            chunk_bwd_key_major(
                tokens, index, do_, dht_, states, gradients, dh0_, with_safe_gate(c), NUM_BUFFERS
            )
    elif has_unsafe_gate(gate, c):
        chunk_bwd(tokens, index, do_, dht_, states, gradients, dh0_, c=c, NUM_BUFFERS=NUM_BUFFERS)
    else:
        chunk_bwd(
            tokens, index, do_, dht_, states, gradients, dh0_, c=with_safe_gate(c), NUM_BUFFERS=NUM_BUFFERS
        )
