"""RWKV-6, chunked backward: scans the chunks of a split in reverse with the state's gradient in registers.

``dv = A^T do + kg dh`` and ``dA = do v^T``; then gradients of the q side and the k side through dA and
through the states at the ends of the chunk (docs/maths.md, section 5). Tiles of values are held transposed,
[V, 16].

The gradient of a log decay sums only terms that contain that decay (section 6). A pair of neighbours (t, t -
1) is not decayed, so under an unsafe gate it is computed apart: its size must not drown the decayed pairs.

Grid: blocks of values, heads, splits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import (
    C,
    chunk_mask,
    chunk_segments,
    does_h0_reach_ht,
    in_one_segment,
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
)
from ..common.chunk_config import with_safe_gate
from ..common.decay import decay_factors, in_first_half, masked_A
from ..common.dots import dot, token_sums_f32
from ..common.gate import cotangent_scale, has_unsafe_gate, load_gate
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_gradient, where_or_zero
from .chunk_bwd_key_major import chunk_bwd_key_major
from .chunk_tokens import scaled_tokens


class Saved(NamedTuple):
    """Arrays of the backward besides the inputs: cotangents do [B, T, H, V] and dht [splits, H, K, V], and
    the states at the starts of chunks.
    """

    do: Tensor
    dht: Tensor
    states: Tensor


@triton.jit
def chunk_bwd(x, saved, index, gate, grads, c: tl.constexpr):
    """Scans the chunks of a split, for one head and block of values."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    t, j = axes.token[:, None], axes.token[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    dh = load_state(saved.dht, head, tile, gate, c, GRADIENT=True)
    u = tl.load(x.u + (split.row * c.H + i_h) * c.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[None, :]
    du = tl.full([c.BK], 0.0, tl.float32)
    if c.unsafe_gate:
        do_scale, grad_scale = cotangent_scale(gate)
    else:
        grad_scale = 1.0
    offsets = token_offsets(axes, c)
    count = tl.cdiv(split.length, C)
    k_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.K
    v_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.V
    part = partial_sums(block, index.T, c)
    buffer = state_pointers(saved.states, 0, axes, c.num_buffers, c)
    for i in range(0, count):
        n = count - 1 - i
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        w = load_tokens(x.w + k_start, offsets.key, mask.key, c.unmasked)
        r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked)
        k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked)
        v = load_tokens(x.v + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
        do = load_tokens(saved.do + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
        at = state_offset(index, split, n, k_start, c.num_buffers, c)
        h = tl.load(buffer + at, mask=tile.mask, other=0.0).to(c.operand)
        if c.unsafe_gate:
            do *= do_scale.to(c.operand)
        decays = decay_factors(w, gate, c, DELTA=False)
        rf, kf = r.to(tl.float32) * c.scale, k.to(tl.float32)
        scaled = scaled_tokens(rf, kf, decays, c)
        strict = t > j
        qg, kg = scaled.r.state, scaled.k.second_half
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            strict = in_one_segment(segments, strict)
            sees_h0, reaches_ht = tokens_seeing_h0(segments), tokens_reaching_ht(segments)
            qg, kg = where_or_zero(qg, sees_h0), where_or_zero(kg, reaches_ht)
        A = masked_A(scaled.r, scaled.k, strict, c, EXCLUSIVE=1)
        A = tl.where(t == j, tl.sum(rf * u * kf, 1)[:, None], A).to(c.operand)
        vt, do_t = tl.trans(v), tl.trans(do)
        dh *= decays.decay_post[None, :]  # now the gradient of h decay_pre + v^T kg
        dstate = dh.to(c.operand)
        dv = dot(do_t, A, c)
        dv = dot(dstate, tl.trans(kg), c, dv)
        store_gradient(grads.v + v_start, offsets.transposed, dv, grad_scale, transposed_mask(mask, axes), c)

        dA = dot(do, vt, c)
        diagonal = tl.sum(where_or_zero(dA, t == j), 1)[:, None]  # do_t . v_t
        dA = where_or_zero(dA, strict)
        undecayed_pairs = where_or_zero(dA, t == j + 1).to(c.operand)
        if c.unsafe_gate:
            dA = where_or_zero(dA, t > j + 1)
        dA = dA.to(c.operand)
        # the q side, then the k side: through the state, and through the pairs of the chunk
        by_state = dot(do, h, c)
        if c.segments:
            by_state = where_or_zero(by_state, sees_h0)
        by_pairs = dot(dA, scaled.k.second_half, c)
        if c.unsafe_gate:
            by_pairs = tl.where(in_first_half(t, 1), dot(dA, scaled.k.first_half, c), by_pairs)
        state_terms, q_terms = qg.to(tl.float32) * by_state, scaled.r.score.to(tl.float32) * by_pairs
        if not c.unsafe_gate:
            q_terms = state_terms + q_terms
        dr = (decays.state_ge * by_state + decays.score_ge * by_pairs) * c.scale
        dr += diagonal * (u * kf * c.scale)
        if c.unsafe_gate:
            dr += dot(undecayed_pairs, k.to(c.operand), c) * c.scale
        store_gradient(grads.r + part + k_start, offsets.key, dr, grad_scale, mask.key, c)
        by_state = dot(v, dstate, c)
        if c.segments:
            by_state = where_or_zero(by_state, reaches_ht)
        dg_state = scaled.k.second_half.to(tl.float32) * by_state
        dA_second = tl.where(in_first_half(t, 1), 0.0, dA).to(dA.dtype) if c.unsafe_gate else dA
        by_pairs = dot(tl.trans(dA_second), scaled.r.score, c)
        k_terms = scaled.k.second_half.to(tl.float32) * by_pairs
        dk = decays.second_half * (by_state + by_pairs) + diagonal * u * rf
        if c.unsafe_gate:
            by_pairs = dot(tl.trans(where_or_zero(dA, in_first_half(t, 1))), scaled.r.score, c)
            k_terms += scaled.k.first_half.to(tl.float32) * by_pairs
            dk_low = decays.first_half * by_pairs
            undecayed = dot(tl.trans(undecayed_pairs), r.to(c.operand), c)
            dk += dk_low + undecayed * c.scale
        store_gradient(grads.k + part + k_start, offsets.key, dk, grad_scale, mask.key, c)
        du += tl.sum(diagonal * rf * kf, 0)

        # the part of the state that passes through the chunk
        if c.unsafe_gate:
            dh *= decays.decay_pre[None, :]
        if c.segments:
            dh = tl.where(does_h0_reach_ht(segments), dh, 0.0)
        dg = tl.full([C, c.BK], 0.0, tl.float32) + tl.sum(h.to(tl.float32) * dh, 0)[None, :]
        if c.unsafe_gate:
            # replace the clamped decay by the exact one
            exact = token_sums_f32(later, state_terms, dg, c)
            dg = token_sums_f32(later, q_terms - k_terms, -k_terms, c)
            dg = exact + decays.clamp_ratio * token_sums_f32(earlier, dg_state, dg, c)
        else:
            dg = token_sums_f32(from_here, q_terms - k_terms, dg - q_terms, c)
            dg = token_sums_f32(earlier, dg_state, dg, c)
        store_gradient(grads.w + part + k_start, offsets.key, dg, grad_scale, mask.key, c)
        dh = dot(do_t, qg, c, dh)
        k_start -= C * c.H * c.K
        v_start -= C * c.H * c.V
    if c.unsafe_gate:
        du *= grad_scale
    store_state(grads.initial_state, head, dh, tile, gate, c, GRADIENT=True)
    at_du = ((block * tl.num_programs(2) + tl.program_id(2)) * c.H + i_h) * c.K
    tl.store(grads.u + at_du + axes.key, du, mask=axes.has_key)


@triton.jit
def rwkv6_bwd_kernel(x, saved, index, grads, c: tl.constexpr):
    """``grads`` are those of ``x``: of r, k, w with an axis of value blocks in front, of u with axes of value
    blocks and splits, to be summed.
    """
    gate = load_gate(index, tl.program_id(2), c)
    if c.key_major:
        if has_unsafe_gate(gate, c):
            chunk_bwd_key_major(x, saved, index, gate, grads, c)
        else:
            chunk_bwd_key_major(x, saved, index, gate, grads, with_safe_gate(c))
    elif has_unsafe_gate(gate, c):
        chunk_bwd(x, saved, index, gate, grads, c)
    else:
        chunk_bwd(x, saved, index, gate, grads, with_safe_gate(c))
