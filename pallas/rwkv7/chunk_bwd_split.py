"""RWKV-7, chunked backward, the second of two kernels: gradients of r, w, k, a and b from what the forward
and ``bwd_dh`` have stored, in programs for chunks and blocks of keys.

With 16-bit inputs two chunks share a stored state and state gradient. The state between the two is never
computed: with v and v_new the first chunk's values and kg, bg its decayed k side, the second chunk's queries
need only ``do h1 = (do h decay_pre + (do v^T) kg + (do v_new^T) bg) decay_post``, products with the state
before the pair and 16 x 16 matrices of values; likewise the first chunk's k side with the gradient after the
pair. Both are exact where a recomputed state would be rounded.
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
    does_h0_reach_ht,
    in_one_segment,
    split_of_program,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
)
from ..common.chunk_config import with_safe_gate
from ..common.decay import decay_factors
from ..common.dots import dot
from ..common.gate import cotangent_scale, has_unsafe_gate, load_gate
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, where_or_zero
from .chunk_bwd_grads import A_gradients, Masks, TokenTiles, Values, token_gradients
from .chunk_bwd_split_one import one_chunk_gradients
from .chunk_bwd_split_pair_safe import safe_gate_pair_gradients
from .chunk_bwd_split_pair_unsafe import unsafe_gate_pair_gradients
from .chunk_tokens import KeyGrads, chunk_grads, scaled_tokens


class GradsSaved(NamedTuple):
    """Arrays of the kernel besides the inputs.

    Attributes:
        do, v_new, da_read: [B, T, H, V].
        states: [rows, states, H, V, K], at the starts of chunks or pairs of chunks.
        dstates: buffers of the gradients at their ends (`state_buffers`).
        grads: gradients of other splits, into whose arrays this one's are written, or None.
    """

    do: Tensor
    v_new: Tensor
    da_read: Tensor
    states: Tensor
    dstates: Tensor
    grads: KeyGrads | None = None


class Chunk(NamedTuple):
    """One chunk's tiles for a block of keys, as `token_gradients` takes them. qg, ag, kg and bg are masked
    to what sees the state at the start and reaches the state at the end.
    """

    tokens: TokenTiles
    decays: Tensor
    scaled: Tensor
    qg: Tensor
    ag: Tensor
    kg: Tensor
    bg: Tensor
    masks: Masks
    value_tiles: Values  # Triton's tuples have an attribute `values`
    h0_reaches_ht: Tensor
    mask: Tensor


@triton.jit
def load_chunk(x, saved, index, gate, split, n, axes, offsets, c: tl.constexpr):
    """The split's chunk ``n``; tokens beyond its end are zero and do not decay."""
    left = split.length - n * C
    mask = chunk_mask(left, axes)
    k_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
    v_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.V
    w = load_tokens(x.w + k_start, offsets.key, mask.key, c.unmasked)
    r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked)
    k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked)
    a = load_tokens(x.a + k_start, offsets.key, mask.key, c.unmasked)
    b = load_tokens(x.b + k_start, offsets.key, mask.key, c.unmasked)
    v = load_tokens(x.v + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
    do = load_tokens(saved.do + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
    v_new = tl.trans(load_tokens(saved.v_new + v_start, offsets.value, mask.value, c.unmasked).to(c.operand))
    da_read = tl.trans(
        load_tokens(saved.da_read + v_start, offsets.value, mask.value, c.unmasked).to(c.operand)
    )
    # gradients of states include the decay after the writes
    decays = decay_factors(w, gate, c, DELTA=True)
    scaled = scaled_tokens(r.to(tl.float32) * c.scale, k, a, b, decays, c)
    causal, strict = causal_masks(axes)
    sees_h0, reaches_ht, passes = mask.token[:, None], mask.token[:, None], mask.token
    qg, ag, kg, bg = scaled.r.state, scaled.a.state, scaled.k.second_half, scaled.b.second_half
    if c.segments:
        # a chunk beyond the end passes the state on; the bits of the chunk before it are loaded
        last = tl.minimum(n, (split.length - 1) // C)
        segments = chunk_segments(index.segment_bits, split, last)
        causal, strict = in_one_segment(segments, causal), in_one_segment(segments, strict)
        sees_h0, reaches_ht, passes = (
            tokens_seeing_h0(segments),
            tokens_reaching_ht(segments),
            does_h0_reach_ht(segments) | (left <= 0),
        )
        qg, ag = where_or_zero(qg, sees_h0), where_or_zero(ag, sees_h0)
        kg, bg = where_or_zero(kg, reaches_ht), where_or_zero(bg, reaches_ht)
    return Chunk(
        TokenTiles(r, k, a, b),
        decays,
        scaled,
        qg,
        ag,
        kg,
        bg,
        Masks(causal, strict, sees_h0, reaches_ht),
        Values(v, do, v_new, da_read),
        passes,
        mask,
    )


@triton.jit
def passed_through(x, chunk, c: tl.constexpr):
    """``x`` [.., K] of the state at one end of ``chunk``, at the other end before the last decay."""
    if c.unsafe_gate:
        x *= chunk.decays.decay_pre
    if c.segments:
        x = tl.where(chunk.h0_reaches_ht, x, 0.0)
    return x


@triton.jit
def chunk_gradients(
    chunk,
    split,
    n,
    h,
    dh,
    dg_pass,
    grads,
    gate,
    offsets,
    c: tl.constexpr,
    READS_GIVEN: tl.constexpr,
    WRITES_GIVEN: tl.constexpr,
):
    """`token_gradients` of the split's chunk ``n``."""
    token_gradients(
        chunk.tokens,
        chunk.decays,
        chunk.scaled,
        chunk.qg,
        chunk.ag,
        chunk.masks,
        A_gradients(chunk.value_tiles, gate, c),
        chunk.value_tiles,
        h,
        dh,
        dg_pass=dg_pass,
        grads=chunk_grads(grads, ((split.first + n * C) * c.H + tl.program_id(1)) * c.K),
        gate=gate,
        offsets=offsets.key,
        mask=chunk.mask.key,
        c=c,
        READS_GIVEN=READS_GIVEN,
        WRITES_GIVEN=WRITES_GIVEN,
    )


@triton.jit
def pair_gradients(x, saved, index, gate, split, n, axes, offsets, h_, dh_, grads, c: tl.constexpr):
    """Gradients of chunks ``n`` and ``n + 1`` from the state at the start of the first and the state
    gradient at the end of the second, or of the first if there is no second.

    Gradients may overwrite ``dh_``: all warps have read it before the first store, since they wait for each
    other in the sum over values.
    """
    mask = axes.has_value[:, None] & axes.has_key[None, :]
    h, dh = tl.load(h_, mask=mask, other=0.0), tl.load(dh_, mask=mask, other=0.0)
    dg_pass = tl.sum(h.to(tl.float32) * dh.to(tl.float32), 0)[None, :]
    h, dh = h.to(c.operand), dh.to(c.operand)
    first = load_chunk(x, saved, index, gate, split, n, axes, offsets, c)
    second = load_chunk(x, saved, index, gate, split, n + 1, axes, offsets, c)
    # the decay between the two; without a second chunk, whose tiles are zeros, dh has it already
    decay_post = tl.where(split.length - n * C > C, first.decays.decay_post, 1.0)[None, :]
    v, v_new, do, da_read = (
        first.value_tiles.v,
        first.value_tiles.v_new,
        second.value_tiles.do,
        second.value_tiles.da_read,
    )
    rk = dot(do, tl.trans(v), c)
    rb = dot(do, v_new, c)
    if c.unsafe_gate:  # da_read and dh are of scaled cotangents already
        do_scale, _ = cotangent_scale(gate)
        rk, rb = rk * do_scale, rb * do_scale
    rk, rb = rk.to(c.operand), rb.to(c.operand)
    ak = dot(tl.trans(da_read), tl.trans(v), c).to(c.operand)
    ab = dot(tl.trans(da_read), v_new, c).to(c.operand)

    # the second chunk's q side: through h, and through the first chunk's k side
    state_r = dot(do, h, c)
    if c.unsafe_gate:
        state_r *= do_scale
    state_a = dot(tl.trans(da_read), h, c)
    state_k = dot(second.value_tiles.v, dh, c)
    state_b = dot(tl.trans(second.value_tiles.v_new), dh, c)
    own = second.qg.to(tl.float32) * state_r + second.ag.to(tl.float32) * state_a
    dg_pass_first = (
        passed_through(passed_through(dg_pass, second, c) + tl.sum(own, 0)[None, :], first, c) * decay_post
    )
    state_r, state_a = passed_through(state_r, first, c), passed_through(state_a, first, c)
    state_r = dot(rk, first.kg, c, state_r)
    state_r = dot(rb, first.bg, c, state_r) * decay_post
    state_a = dot(ak, first.kg, c, state_a)
    state_a = dot(ab, first.bg, c, state_a) * decay_post

    # the first chunk's k side: through dh, and through the second chunk's q side
    first_k = dot(v, dh, c)
    first_b = dot(tl.trans(v_new), dh, c)
    own = first.kg.to(tl.float32) * first_k + first.bg.to(tl.float32) * first_b
    dg_pass_second = passed_through(
        (passed_through(dg_pass, first, c) + tl.sum(own, 0)[None, :]) * decay_post, second, c
    )
    first_k, first_b = passed_through(first_k, second, c), passed_through(first_b, second, c)
    first_k = dot(tl.trans(rk), second.qg, c, first_k)
    first_k = dot(tl.trans(ak), second.ag, c, first_k) * decay_post
    first_b = dot(tl.trans(rb), second.qg, c, first_b)
    first_b = dot(tl.trans(ab), second.ag, c, first_b) * decay_post

    read, written, dg_pass = (state_r, state_a), (state_k, state_b), tl.sum(dg_pass_second, 0)
    chunk_gradients(
        second,
        split,
        n + 1,
        read,
        written,
        dg_pass,
        grads,
        gate,
        offsets,
        c=c,
        READS_GIVEN=True,
        WRITES_GIVEN=True,
    )
    # loaded again, so that it takes no registers meanwhile
    first = load_chunk(x, saved, index, gate, split, n, axes, offsets, c)
    h = tl.load(h_, mask=mask, other=0.0).to(c.operand)
    written, dg_pass = (first_k, first_b), tl.sum(dg_pass_first, 0)
    chunk_gradients(
        first,
        split,
        n,
        h,
        written,
        dg_pass,
        grads,
        gate,
        offsets,
        c=c,
        READS_GIVEN=False,
        WRITES_GIVEN=True,
    )


@triton.jit
def block_gradients(x, saved, index, gate, grads, c: tl.constexpr):
    """The chunks that share a state, and one block of ``BK`` keys."""
    split, n = chunks_of_program(tl.program_id(0) // c.num_blocks, index, c)
    if split.length > n * C:
        block = tl.program_id(0) % c.num_blocks
        if c.chunks_per_state == 1:
            one_chunk_gradients(x, saved, index, gate, split, n, block, grads, c)
        else:
            axes = tile_axes(block, 0, c)
            offsets = token_offsets(axes, c)
            k_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
            h_ = state_pointers((saved.states,), 0, axes, 0, c)
            h_ += state_offset(index, split, n, k_start, 0, c)
            dh_ = state_pointers(saved.dstates, 0, axes, c.num_buffers, c)
            dh_ += state_offset(index, split, n, k_start, c.num_buffers, c)
            if c.pair_tile and c.unsafe_gate:
                unsafe_gate_pair_gradients(x, saved, index, gate, split, n, axes, h_, dh_, grads, c)
            elif c.pair_tile:
                safe_gate_pair_gradients(x, saved, index, gate, split, n, axes, h_, dh_, grads, c)
            else:
                pair_gradients(x, saved, index, gate, split, n, axes, offsets, h_, dh_, grads, c)


@triton.jit
def rwkv7_bwd_grads_kernel(x, saved, index, grads, c: tl.constexpr):
    """Grid (states times ``num_blocks`` blocks of keys, heads, splits), see `chunks_of_program`."""
    gate = load_gate(index, split_of_program(tl.program_id(0) // c.num_blocks, index, c), c)
    if saved.grads is not None:
        grads = saved.grads
    if has_unsafe_gate(gate, c):
        block_gradients(x, saved, index, gate, grads, c)
    else:
        block_gradients(x, saved, index, gate, grads, with_safe_gate(c))
