"""RWKV-7, chunked backward in Triton, the second of two kernels (chunk_bwd.py): programs for blocks of keys
make the gradients of r, w, k, a, b from what the forward and the carry kernel have left in memory.

In 16 bits that is a state, and the gradient of a state, for every two chunks. The state S1 between the two,
and its gradient, are never made: with V and U the first chunk's values, K' and B' its decayed writes, the
second chunk's rows need only ``dY S1 = (dY S pre + (dY V^T) K' + (dY U^T) B') post``, its products with the
state before the pair and 16 x 16 scores of values; likewise the first chunk's columns with the gradient after
the pair. Both are exact where a state made again would have been rounded.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    Index,
    causal_masks,
    chunk_mask,
    chunk_segments,
    chunks_of_program,
    cotangent_scale,
    does_h0_reach_ht,
    has_unsafe_gate,
    in_one_segment,
    load_gate,
    split_of_program,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
    with_safe_gate,
)
from ..common.decay import decay_factors
from ..common.dots import dot
from ..common.state_buffers import aliased_gradients, state_offset, state_pointers
from ..common.token_tiles import load_tokens, where_or_zero
from .chunk_bwd_grads import Masks, TokenTiles, Values, score_gradients, token_gradients
from .chunk_bwd_split_one import one_chunk_gradients
from .chunk_bwd_split_pair import safe_gate_pair_gradients
from .chunk_tokens import Tokens, advanced, scaled_tokens


class Saved(NamedTuple):
    """What the forward and the carry kernel have left: dY, U and dZ like v, states that enter chunks,
    gradients of states that leave chunks.
    """

    do_: Any
    v_new_: Any
    da_read_: Any
    states_: Any
    dstates: tuple[Any, ...]


class Chunk(NamedTuple):
    """One chunk's tiles for a block of keys, as `token_gradients` takes them.

    ``read_r`` and ``read_a`` are rows that reach the entering state, ``written_k`` and ``written_b`` columns
    that reach the leaving one; ``passes`` is whether the one reaches the other.
    """

    tokens: TokenTiles
    decays: Any
    scaled: Any
    qg: Any
    ag: Any
    kg: Any
    bg: Any
    masks: Masks
    value_tiles: Values  # a tuple of Triton's has an attribute `values` of its own
    h0_reaches_ht: Any
    mask: Any


@triton.jit
def load_chunk(tokens, index, buffer, split, n, axes, offsets, c: tl.constexpr):
    """The sequence's chunk ``n``; tokens behind the sequence's end are zero and do not decay."""
    left = split.length - n * C
    mask = chunk_mask(left, axes)
    pk = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
    pv = ((split.first + n * C) * c.H + tl.program_id(1)) * c.V
    w = load_tokens(tokens.w_ + pk, offsets.key, mask.key, c.unmasked)
    r = load_tokens(tokens.r_ + pk, offsets.key, mask.key, c.unmasked)
    k = load_tokens(tokens.k_ + pk, offsets.key, mask.key, c.unmasked)
    a = load_tokens(tokens.a_ + pk, offsets.key, mask.key, c.unmasked)
    b = load_tokens(tokens.b_ + pk, offsets.key, mask.key, c.unmasked)
    v = load_tokens(tokens.v_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand)
    do = load_tokens(buffer.do_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand)
    v_new = tl.trans(load_tokens(buffer.v_new_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand))
    da_read = tl.trans(load_tokens(buffer.da_read_ + pv, offsets.value, mask.value, c.unmasked).to(c.operand))
    decays = decay_factors(
        w, index.gate, c, DELTA=True
    )  # gradients of states have the decay after the writes in them
    scaled = scaled_tokens(r.to(tl.float32) * c.scale, k, a, b, decays, c)
    causal, strict = causal_masks(axes)
    sees_h0, reaches_ht, passes = mask.token[:, None], mask.token[:, None], mask.token
    qg, ag, kg, bg = scaled.r.state, scaled.a.state, scaled.k.second_half, scaled.b.second_half
    if c.segments:
        # a chunk that is not there has no token, and hands on what comes; the one before it is read
        last = tl.minimum(n, (split.length - 1) // C)
        segments = chunk_segments(index.segment_bits_, split, last)
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
    """``x`` [.., K] of the entering state, as it leaves ``chunk`` before the last decay, or the other way."""
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
    gradients,
    gate,
    offsets,
    c: tl.constexpr,
    READS_GIVEN: tl.constexpr,
    WRITES_GIVEN: tl.constexpr,
):
    """`token_gradients` of the sequence's chunk ``n``."""
    token_gradients(
        chunk.tokens,
        chunk.decays,
        chunk.scaled,
        chunk.qg,
        chunk.ag,
        chunk.masks,
        score_gradients(chunk.value_tiles, gate, c),
        chunk.value_tiles,
        h,
        dh,
        dg_pass=dg_pass,
        gradients=advanced(gradients, ((split.first + n * C) * c.H + tl.program_id(1)) * c.K),
        gate=gate,
        offsets=offsets.key,
        mask=chunk.mask.key,
        c=c,
        READS_GIVEN=READS_GIVEN,
        WRITES_GIVEN=WRITES_GIVEN,
    )


@triton.jit
def pair_gradients(tokens, index, buffer, split, n, axes, offsets, h_, dh_, gradients, c: tl.constexpr):
    """The gradients of chunks ``n`` and ``n + 1`` from the state that enters the first and the gradient of
    that which leaves the second, or the first where there is no second.

    ``dS_`` may be where gradients go: all warps have read it before the first one is stored, for they wait
    for each other in the sum over values.
    """
    mask = axes.has_value[:, None] & axes.has_key[None, :]
    h, dh = tl.load(h_, mask=mask, other=0.0), tl.load(dh_, mask=mask, other=0.0)
    dg_pass = tl.sum(h.to(tl.float32) * dh.to(tl.float32), 0)[None, :]
    h, dh = h.to(c.operand), dh.to(c.operand)
    first = load_chunk(tokens, index, buffer, split, n, axes, offsets, c)
    second = load_chunk(tokens, index, buffer, split, n + 1, axes, offsets, c)
    # the decay between the two; without a second one, whose tiles are zeros, dS has it already
    decay_post = tl.where(split.length - n * C > C, first.decays.decay_post, 1.0)[None, :]
    v, v_new, do, da_read = (
        first.value_tiles.v,
        first.value_tiles.v_new,
        second.value_tiles.do,
        second.value_tiles.da_read,
    )
    rk = dot(do, tl.trans(v), c)
    rb = dot(do, v_new, c)
    if c.unsafe_gate:  # dZ and the gradients of states have been made of scaled cotangents
        do_scale, _ = cotangent_scale(index.gate)
        rk, rb = rk * do_scale, rb * do_scale
    rk, rb = rk.to(c.operand), rb.to(c.operand)
    ak = dot(tl.trans(da_read), tl.trans(v), c).to(c.operand)
    ab = dot(tl.trans(da_read), v_new, c).to(c.operand)

    # what the second chunk's rows read: of S, and of the first chunk's writes
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

    # what the first chunk's columns get: of dS, and of the second chunk's reads
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
        gradients,
        index.gate,
        offsets,
        c=c,
        READS_GIVEN=True,
        WRITES_GIVEN=True,
    )
    # loaded once more, so that nothing waits in registers meanwhile
    first = load_chunk(tokens, index, buffer, split, n, axes, offsets, c)
    h = tl.load(h_, mask=mask, other=0.0).to(c.operand)
    written, dg_pass = (first_k, first_b), tl.sum(dg_pass_first, 0)
    chunk_gradients(
        first,
        split,
        n,
        h,
        written,
        dg_pass,
        gradients,
        index.gate,
        offsets,
        c=c,
        READS_GIVEN=False,
        WRITES_GIVEN=True,
    )


@triton.jit
def block_gradients(
    tokens,
    index,
    chunk_indices_,
    buffer,
    gradients,
    c: tl.constexpr,
    NK: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    CHUNKS_PER_STATE: tl.constexpr,
    FROM_SCANS: tl.constexpr,
    PAIR_TILE: tl.constexpr = False,
    LATE: tl.constexpr = False,
):
    """The chunks that share a state, and one block of keys; ``mode.BK`` is the block's size here."""
    split, n = chunks_of_program(tl.program_id(0) // NK, chunk_indices_, index, CHUNKS_PER_STATE, c)
    if split.length > n * C:
        block = tl.program_id(0) % NK
        if CHUNKS_PER_STATE == 1:
            one_chunk_gradients(
                tokens,
                index,
                buffer,
                split,
                n,
                block,
                gradients,
                c=c,
                NUM_BUFFERS=NUM_BUFFERS,
                FROM_SCANS=FROM_SCANS,
            )
        else:
            axes = tile_axes(block, 0, c)
            offsets = token_offsets(axes, c)
            pk = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
            h_ = state_pointers((buffer.states_,), 0, axes, c, 0)
            h_ += state_offset(index, split, n, pk, c, 0, CHUNKS_PER_STATE)
            dh_ = state_pointers(buffer.dstates, 0, axes, c, NUM_BUFFERS)
            dh_ += state_offset(index, split, n, pk, c, NUM_BUFFERS, CHUNKS_PER_STATE)
            if PAIR_TILE:
                safe_gate_pair_gradients(
                    tokens, index, buffer, split, n, axes, h_, dh_, gradients, c=c, LATE=LATE
                )
            else:
                pair_gradients(tokens, index, buffer, split, n, axes, offsets, h_, dh_, gradients, c=c)


@triton.jit
def rwkv7_bwd_grads_kernel(
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
    chunk_indices_,
    do_,
    v_new_,
    da_read_,
    states_,
    dstates0_,
    dstates1_,
    dstates2_,
    dstates3_,
    T,
    split_len,
    dr_,
    dw_,
    dk_,
    da_,
    db_,
    c: tl.constexpr,
    NK: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    NUM_ALIASED: tl.constexpr,
    CHUNKS_PER_STATE: tl.constexpr,
    FROM_SCANS: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    MAX_REGISTERS: tl.constexpr,
):
    """Grid (states times ``BLOCKS`` of keys, heads, stretches), see `chunks_of_program`: after the carry
    kernel has stored dZ and the gradients of the states, one for ``EVERY`` chunks, one or two. ``AT_ONCE``
    says that two chunks are one tile in the bounded form, ``LEAVING`` that gradients of states come from the
    recurrent form (chunk_bwd_split_one.py). A thread has at most so many ``REGISTERS``, if not
    0 (backend/lowering.py).
    """
    gate = load_gate(gate_, split_of_program(tl.program_id(0) // NK, chunk_indices_, c), c)
    tokens, index = (
        Tokens(r_, w_, k_, v_, a_, b_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    dstates = (dstates0_, dstates1_, dstates2_, dstates3_)
    dr_, dk_, da_, db_ = aliased_gradients(dstates, (dr_, dk_, da_, db_), NUM_ALIASED)
    buffer, out = (
        Saved(do_, v_new_, da_read_, states_, dstates),
        Tokens(dr_, dw_, dk_, do_, da_, db_),
    )  # dv is there
    LATE: tl.constexpr = MAX_REGISTERS > 0
    if has_unsafe_gate(gate, c):
        block_gradients(
            tokens,
            index,
            chunk_indices_,
            buffer,
            out,
            c=c,
            NK=NK,
            NUM_BUFFERS=NUM_BUFFERS,
            CHUNKS_PER_STATE=CHUNKS_PER_STATE,
            FROM_SCANS=FROM_SCANS,
        )
    else:
        block_gradients(
            tokens,
            index,
            chunk_indices_,
            buffer,
            out,
            c=with_safe_gate(c),
            NK=NK,
            NUM_BUFFERS=NUM_BUFFERS,
            CHUNKS_PER_STATE=CHUNKS_PER_STATE,
            FROM_SCANS=FROM_SCANS,
            PAIR_TILE=PAIR_TILE,
            LATE=LATE,
        )
