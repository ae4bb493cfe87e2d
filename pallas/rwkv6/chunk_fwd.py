"""RWKV-6, chunked forward.

``o = qg h + A v`` with ``A[t, i] = sum_c r_t k_i exp(ge_t - gi_i)`` for i < t and ``r_t . (u k_t)`` on the
diagonal; ``h <- (h decay_pre + v^T kg) decay_post``. g is the log decay summed from the chunk's start, gi
with the token's own decay and ge without; qg and kg are r and k times their decays from and to the ends of
the chunk. The state is held as [V, K] (docs/maths.md, section 2; `decay` has the factors).

Grid: blocks of values, heads, splits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import (
    C,
    batched16_mask,
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
from ..common.decay import decay_factors, masked_A, safe_gate_factors_by_cumsum
from ..common.dots import dot, token_sums, transposed_A
from ..common.gate import has_unsafe_gate, load_gate, state_scale
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_tokens
from .chunk_tokens import scaled_tokens


class FwdOut(NamedTuple):
    """Outputs of the forward: o [B, T, H, V], ht [splits, H, K, V] float32, and the states at the starts of
    chunks, or None where nothing is saved.
    """

    o: Tensor
    ht: Tensor
    states: Tensor


@triton.jit
def chunk_fwd(x, index, gate, out, c: tl.constexpr):
    """Scans the chunks of a split, for one head and block of values."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    diagonal = axes.token[:, None] == axes.token[None, :]
    identity = tl.where(diagonal, 1.0, 0.0)
    chunk_strict = axes.token[:, None] > axes.token[None, :]
    head, tile = (tl.program_id(2) * c.H + i_h).to(tl.int64), state_tile(axes, c)
    h, count = load_state(x.initial_state, head, tile, gate, c), tl.cdiv(split.length, C)
    h = tl.where(count > 0, h, h * state_scale(gate, c, True))
    u = tl.load(x.u + (split.row * c.H + i_h) * c.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[None, :]
    offsets = token_offsets(axes, c)
    if out.states is not None:
        buffer = state_pointers(out.states, 0, axes, c.num_buffers, c)
    for n in range(0, count):
        k_start, v_start = chunk_starts(split, n, i_h, c)
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        if c.unsafe_gate:
            w = load_tokens(x.w + k_start, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        else:
            w = load_tokens(x.w + k_start, offsets.key, mask.key, c.unmasked)
        # Read elementwise, tiles of r and k would have bank conflicts; as operands of products they have none
        if c.unsafe_gate and c.operand != tl.float32:
            batched = batched16_mask(mask, c)
            r = load_tokens(x.r + k_start, offsets.batched16, batched, c.unmasked)
            k = load_tokens(x.k + k_start, offsets.batched16, batched, c.unmasked)
            r, k = token_sums(identity, r, c, True) * c.scale, token_sums(identity, k, c, True)
        else:
            r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
            k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32)
        vt = load_tokens(x.v + v_start, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(
            c.operand
        )
        last = n + 1 == count
        decays = (
            decay_factors(w, gate, c, DELTA=False, BATCHED16=True)
            if c.unsafe_gate
            else safe_gate_factors_by_cumsum(w, gate, last)
        )
        scaled = scaled_tokens(r, k, decays, c)
        strict = chunk_strict
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            strict = in_one_segment(segments, chunk_strict)
        A = masked_A(scaled.r, scaled.k, strict, c, EXCLUSIVE=1)
        A = tl.where(diagonal, tl.sum(r * u * k, 1)[:, None], A).to(c.operand)
        qg, kg = scaled.r.state, scaled.k.second_half
        if c.segments:
            kg = masked(kg, tokens_reaching_ht(segments), segments)
        state = h.to(c.operand)
        if out.states is not None:
            at = state_offset(index, split, n, k_start, c.num_buffers, c)
            tl.store(buffer + at, state.to(out.states[0].dtype.element_ty), mask=tile.mask)
        o = dot(state, tl.trans(qg), c)
        if c.segments:
            o = masked(o, tl.trans(tokens_seeing_h0(segments)), segments)
        o = dot(vt, transposed_A(A, c), c, o)
        if c.segments:
            h = masked(h, does_h0_reach_ht(segments), segments)
        if c.unsafe_gate:
            h *= decays.decay_pre[None, :]
        h = dot(vt, kg, c, h) * decays.decay_post[None, :]
        store_tokens(out.o + v_start, offsets.transposed, o, transposed_mask(mask, axes), c.unmasked)
    store_state(out.ht, head, h, tile, gate, c)


@triton.jit
def rwkv6_fwd_kernel(x, index, out, c: tl.constexpr):
    """``x`` are the op's inputs with u [B, H, K] and the states at the starts of splits."""
    gate = load_gate(index, tl.program_id(2), c)
    if has_unsafe_gate(gate, c):
        chunk_fwd(x, index, gate, out, c)
    else:
        chunk_fwd(x, index, gate, out, with_safe_gate(c))
