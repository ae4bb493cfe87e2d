"""RWKV-7, chunked backward: scans the chunks of a split in reverse with the state's gradient in registers.

A and the states come from the forward, all else is computed again. With dh the gradient of the state at the
end of the chunk, ``dv_new = A_qb^T do + bg dh``, ``da_read = A_ab_inv^T dv_new``, ``dv = A_qk^T do + kg dh +
A_ak^T da_read``, ``dA = (do, da_read) (v, v_new)^T``; then gradients of the q side and the k side
(docs/maths.md, section 5). Tiles of values are held transposed, [V, 16], as in the forward.

Heads of 65 to 128, in float32 all up to 128, take two kernels, since their tiles do not fit the registers at
once: ``bwd_dh`` computes dh, dv and da_read alone, with values split over programs, and stores dh, in 16
bits of every second chunk; `chunk_bwd_split` then has programs for chunks and blocks of keys.

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
from ..common.decay import decay_factors
from ..common.dots import dot
from ..common.gate import cotangent_scale, has_unsafe_gate, load_gate
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_gradient, store_tokens, where_or_zero
from .chunk_A import load_A
from .chunk_bwd_grads import A_gradients, Masks, TokenTiles, Values, token_gradients
from .chunk_bwd_key_major import chunk_bwd_key_major
from .chunk_tokens import chunk_grads, scaled_tokens


class Saved(NamedTuple):
    """Arrays of the backward besides the inputs.

    Attributes:
        do: cotangents of outputs, [B, T, H, V].
        dht: cotangents of the states at the ends of splits, [splits, H, K, V].
        states: buffers of the states at the starts of chunks; None in ``bwd_dh``.
        A: [rows, chunks, H, 4, 16, 16].
    """

    do: Tensor
    dht: Tensor
    states: Tensor
    A: Tensor


class DhOut(NamedTuple):
    """Outputs of ``bwd_dh``: dv and da_read [B, T, H, V]; dh0 [splits, H, K, V]; buffers of the gradients of
    the states at the ends of chunks, before the last decay.
    """

    v: Tensor
    initial_state: Tensor
    dstates: Tensor
    da_read: Tensor


@triton.jit
def chunk_bwd(x, saved, index, gate, grads, c: tl.constexpr, FUSED: tl.constexpr):
    """Scans the chunks of a split, for one head and block of values. ``grads`` are RWKV7Inputs if ``FUSED``,
    which computes all gradients, else `DhOut`.
    """
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    chunk_causal, chunk_strict = causal_masks(axes)
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    dh = load_state(saved.dht, head, tile, gate, c, GRADIENT=True)
    if c.unsafe_gate:
        do_scale, grad_scale = cotangent_scale(gate)
    else:
        grad_scale = 1.0
    offsets = token_offsets(axes, c)
    count = tl.cdiv(split.length, C)
    part = partial_sums(block, index.T, c)
    if FUSED:
        buffer = state_pointers(saved.states, 0, axes, c.num_buffers, c)
    else:
        buffer = state_pointers(grads.dstates, block, axes, c.num_buffers, c)
    for i in range(0, count):
        n = count - 1 - i
        k_start, v_start = chunk_starts(split, n, i_h, c)
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        chunk = (split.first_chunk + n) * c.H + i_h
        if FUSED:
            w = load_tokens(x.w + k_start, offsets.key, mask.key, c.unmasked)
        else:
            w = load_tokens(x.w + k_start, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked)
        k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked)
        a = load_tokens(x.a + k_start, offsets.key, mask.key, c.unmasked)
        b = load_tokens(x.b + k_start, offsets.key, mask.key, c.unmasked)
        if FUSED:
            do = load_tokens(saved.do + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
            do_t = tl.trans(do)
            v = load_tokens(x.v + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
            at = buffer + state_offset(index, split, n, k_start, c.num_buffers, c)
            h = tl.load(at, mask=tile.mask, other=0.0).to(c.operand)
        else:
            do_t = load_tokens(
                saved.do + v_start, offsets.transposed, transposed_mask(mask, axes), c.unmasked
            ).to(c.operand)
        A = load_A(saved.A, chunk, c)
        decays = decay_factors(w, gate, c, DELTA=True, BATCHED16=not FUSED)
        scaled = scaled_tokens(r.to(tl.float32) * c.scale, k, a, b, decays, c)
        causal, strict = chunk_causal, chunk_strict
        qg, ag, kg, bg = scaled.r.state, scaled.a.state, scaled.k.second_half, scaled.b.second_half
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
            sees_h0, reaches_ht = tokens_seeing_h0(segments), tokens_reaching_ht(segments)
            qg, ag = where_or_zero(qg, sees_h0), where_or_zero(ag, sees_h0)
            kg, bg = where_or_zero(kg, reaches_ht), where_or_zero(bg, reaches_ht)
        else:
            sees_h0, reaches_ht = mask.token[:, None], mask.token[:, None]
        if c.unsafe_gate:
            do_t *= do_scale.to(c.operand)
        dh *= decays.decay_post[None, :]  # now the gradient of h decay_pre + v^T kg + v_new^T bg
        dstate = dh.to(c.operand)
        dv_new = dot(do_t, A.A_qb, c)
        dv_new = dot(dstate, tl.trans(bg), c, dv_new)
        da_read = dot(dv_new.to(c.operand), A.A_ab_inv, c).to(c.operand)
        dv = dot(do_t, A.A_qk, c)
        dv = dot(dstate, tl.trans(kg), c, dv)
        dv = dot(da_read, A.A_ak, c, dv)
        store_gradient(grads.v + v_start, offsets.transposed, dv, grad_scale, transposed_mask(mask, axes), c)
        if FUSED:
            a_read = dot(h, tl.trans(ag), c)
            a_read = dot(tl.trans(v), tl.trans(A.A_ak), c, a_read)
            v_new = dot(a_read.to(c.operand), tl.trans(A.A_ab_inv), c).to(c.operand)
        else:
            store_tokens(
                grads.da_read + v_start, offsets.transposed, da_read, transposed_mask(mask, axes), c.unmasked
            )
            at = buffer + state_offset(index, split, n, k_start, c.num_buffers, c)
            last = ((n + 1) % c.chunks_per_state == 0) | (i == 0)
            tl.store(at, dstate.to(grads.dstates[0].dtype.element_ty), mask=tile.mask & last)
        # the part of the state that passes through the chunk
        if c.unsafe_gate:
            dh *= decays.decay_pre[None, :]
        if c.segments:
            dh = tl.where(does_h0_reach_ht(segments), dh, 0.0)
        if FUSED:
            at, values = part + k_start, Values(v, do, v_new, da_read)
            token_gradients(
                TokenTiles(r, k, a, b),
                decays,
                scaled,
                qg,
                ag,
                Masks(causal, strict, sees_h0, reaches_ht),
                A_gradients(values, gate, c),
                values,
                h,
                dstate,
                dg_pass=tl.sum(h.to(tl.float32) * dh, 0),
                grads=chunk_grads(grads, at),
                gate=gate,
                offsets=offsets.key,
                mask=mask.key,
                c=c,
            )
        dh = dot(do_t, qg, c, dh)
        dh = dot(da_read, ag, c, dh)
    store_state(grads.initial_state, head, dh, tile, gate, c, GRADIENT=True)


@triton.jit
def rwkv7_bwd_kernel(x, saved, index, grads, c: tl.constexpr):
    """All gradients: ``grads`` are those of ``x``, of r, w, k, a and b with an axis of value blocks in
    front, to be summed.
    """
    gate = load_gate(index, tl.program_id(2), c)
    if c.key_major:
        if has_unsafe_gate(gate, c):
            chunk_bwd_key_major(x, saved, index, gate, grads, c)
        else:
            chunk_bwd_key_major(x, saved, index, gate, grads, with_safe_gate(c))
    elif has_unsafe_gate(gate, c):
        chunk_bwd(x, saved, index, gate, grads, c, FUSED=True)
    else:
        chunk_bwd(x, saved, index, gate, grads, with_safe_gate(c), FUSED=True)


@triton.jit
def rwkv7_bwd_dh_kernel(x, saved, index, out, c: tl.constexpr):
    """The first of two kernels: gradients of v and of the states."""
    gate = load_gate(index, tl.program_id(2), c)
    if has_unsafe_gate(gate, c):
        chunk_bwd(x, saved, index, gate, out, c, FUSED=False)
    else:
        chunk_bwd(x, saved, index, gate, out, with_safe_gate(c), FUSED=False)
