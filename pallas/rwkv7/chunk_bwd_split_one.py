"""RWKV-7, chunked backward: gradients of one chunk and a block of keys, where every chunk has a stored state
and state gradient: with float32 operands. Everything about values is a sum over them, computed a block at a
time.
"""

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    causal_masks,
    chunk_mask,
    chunk_segments,
    does_h0_reach_ht,
    in_one_segment,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
)
from ..common.decay import decay_factors
from ..common.dots import dot
from ..common.gate import state_scale
from ..common.state_buffers import dstate_offset, state_offset, state_pointers
from ..common.token_tiles import load_tokens, where_or_zero
from .chunk_bwd_grads import A_gradients, Masks, TokenTiles, Values, token_gradients
from .chunk_tokens import chunk_grads, scaled_tokens


@triton.jit
def sums_over_values(x, saved, index, gate, split, n, key_block, k_start, v_start, c: tl.constexpr):
    """`A_gradients`; the products of do and da_read with the state at the start, and of v and v_new with the
    state gradient at the end; and the sum of the products of both, [K].
    """
    zero, zero_k = tl.full([C, C], 0.0, tl.float32), tl.full([C, c.BK], 0.0, tl.float32)
    qk, qb, ak, ab = zero, zero, zero, zero
    state_r, state_a, state_k, state_b = zero_k, zero_k, zero_k, zero_k
    dg_pass = tl.full([c.BK], 0.0, tl.float32)
    for block in range(0, tl.cdiv(c.V, c.BV)):
        axes = tile_axes(key_block, block, c)
        at, mask = token_offsets(axes, c).value, chunk_mask(split.length - n * C, axes).value
        v = load_tokens(x.v + v_start, at, mask, c.unmasked).to(c.operand)
        do = load_tokens(saved.do + v_start, at, mask, c.unmasked).to(c.operand)
        v_new = tl.trans(load_tokens(saved.v_new + v_start, at, mask, c.unmasked).to(c.operand))
        da_read = tl.trans(load_tokens(saved.da_read + v_start, at, mask, c.unmasked).to(c.operand))
        if c.unsafe_gate and c.from_scans:
            da_read *= state_scale(gate, c, True)
        both = axes.has_value[:, None] & axes.has_key[None, :]
        h_ = state_pointers((saved.states,), block, axes, 0, c) + state_offset(index, split, n, k_start, 0, c)
        dh_ = state_pointers(saved.dstates, block, axes, c.num_buffers, c)
        dh_ += dstate_offset(index, split, n, k_start, c)
        h, dh = tl.load(h_, mask=both, other=0.0), tl.load(dh_, mask=both, other=0.0)
        dA = A_gradients(Values(v, do, v_new, da_read), gate, c)
        qk, qb, ak, ab = qk + dA[0], qb + dA[1], ak + dA[2], ab + dA[3]
        dg_pass += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 0)
        h, dh = h.to(c.operand), dh.to(c.operand)
        state_r = dot(do, h, c, state_r)
        state_a = dot(tl.trans(da_read), h, c, state_a)
        state_k = dot(v, dh, c, state_k)
        state_b = dot(tl.trans(v_new), dh, c, state_b)
    if c.unsafe_gate:
        state_r *= state_scale(gate, c, True)
    return (qk, qb, ak, ab), (state_r, state_a), (state_k, state_b), dg_pass


@triton.jit
def one_chunk_gradients(x, saved, index, gate, split, n, key_block, grads, c: tl.constexpr):
    """Gradients of the split's chunk ``n``. State gradients `Config.from_scans` are of the states at the
    ends of chunks, after the last decay.

    Gradients may overwrite stored state gradients: all warps have read them before the first store.
    """
    i_h = tl.program_id(1)
    k_start = ((split.first + n * C) * c.H + i_h) * c.K
    v_start = ((split.first + n * C) * c.H + i_h) * c.V
    dA, read, written, dg_pass = sums_over_values(
        x, saved, index, gate, split, n, key_block, k_start, v_start, c
    )
    tl.debug_barrier()
    axes = tile_axes(key_block, 0, c)
    offsets, mask = token_offsets(axes, c), chunk_mask(split.length - n * C, axes)
    w = load_tokens(x.w + k_start, offsets.key, mask.key, c.unmasked)
    r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked)
    k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked)
    a = load_tokens(x.a + k_start, offsets.key, mask.key, c.unmasked)
    b = load_tokens(x.b + k_start, offsets.key, mask.key, c.unmasked)
    # gradients of states include the decay after the writes
    decays = decay_factors(w, gate, c, DELTA=True)
    scaled = scaled_tokens(r.to(tl.float32) * c.scale, k, a, b, decays, c)
    causal, strict = causal_masks(axes)
    sees_h0, reaches_ht = mask.token[:, None], mask.token[:, None]
    qg, ag = scaled.r.state, scaled.a.state
    if c.from_scans:
        # the recurrent kernels' gradients have no state scale; scale before decay, to stay in float32's range
        back, decay_post = state_scale(gate, c, True), decays.decay_post[None, :]
        written, dg_pass = (
            (written[0] * back * decay_post, written[1] * back * decay_post),
            dg_pass * back * decays.decay_post,
        )
        if not c.unsafe_gate:
            state = state_scale(gate, c, False)
            read, dg_pass = (read[0] * state, read[1] * state), dg_pass * state
    if c.unsafe_gate:
        dg_pass *= decays.decay_pre
    if c.segments:
        segments = chunk_segments(index.segment_bits, split, n)
        causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
        sees_h0, reaches_ht = tokens_seeing_h0(segments), tokens_reaching_ht(segments)
        qg, ag = where_or_zero(qg, sees_h0), where_or_zero(ag, sees_h0)
        dg_pass = tl.where(does_h0_reach_ht(segments), dg_pass, 0.0)
    token_gradients(
        TokenTiles(r, k, a, b),
        decays,
        scaled,
        qg,
        ag,
        Masks(causal, strict, sees_h0, reaches_ht),
        dA,
        None,
        read,
        written,
        dg_pass=dg_pass,
        grads=chunk_grads(grads, k_start),
        gate=gate,
        offsets=offsets.key,
        mask=mask.key,
        c=c,
        READS_GIVEN=True,
        WRITES_GIVEN=True,
    )
