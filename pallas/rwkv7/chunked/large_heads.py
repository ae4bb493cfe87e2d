"""RWKV-7, chunked backward in Triton, the second of two kernels (backward.py): programs for blocks of keys
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

from ...device.chunk import (
    C,
    Ranges,
    bounded,
    causal,
    chunk_elements,
    chunk_offsets,
    chunk_segments,
    chunks_of_program,
    cotangent_scale,
    form_of,
    needs_any_decay,
    passing,
    reached,
    reaching,
    sequence_of_program,
    tile_axes,
    together,
)
from ...device.decay import factors
from ...device.kept_states import gradients_over_states, state_place, state_rows
from ...device.products import product
from ...device.tokens import load_tokens, only
from .bounded_pairs import bounded_pair_gradients
from .gradients import Masks, TokenTiles, Values, score_gradients, token_gradients
from .one_chunk import one_gradients
from .tokens import Tokens, advanced, scaled_tokens


class Kept(NamedTuple):
    """What the forward and the carry kernel have left: dY, U and dZ like v, states that enter chunks,
    gradients of states that leave chunks.
    """

    dy_: Any
    u_: Any
    dz_: Any
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
    read_r: Any
    read_a: Any
    written_k: Any
    written_b: Any
    masks: Masks
    value_tiles: Values  # a tuple of Triton's has an attribute `values` of its own
    passes: Any
    there: Any


@triton.jit
def load_chunk(tokens, ranges, kept, here, n, axes, offsets, mode: tl.constexpr):
    """The sequence's chunk ``n``; tokens behind the sequence's end are zero and do not decay."""
    left = here.length - n * C
    there = chunk_elements(left, axes)
    pk = ((here.first + n * C) * mode.H + tl.program_id(1)) * mode.K
    pv = ((here.first + n * C) * mode.H + tl.program_id(1)) * mode.V
    w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
    r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even)
    k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even)
    a = load_tokens(tokens.a_ + pk, offsets.key, there.key, mode.even)
    b = load_tokens(tokens.b_ + pk, offsets.key, there.key, mode.even)
    v = load_tokens(tokens.v_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
    dy = load_tokens(kept.dy_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
    U = tl.trans(load_tokens(kept.u_ + pv, offsets.value, there.value, mode.even).to(mode.operand))
    dZ = tl.trans(load_tokens(kept.dz_ + pv, offsets.value, there.value, mode.even).to(mode.operand))
    decays = factors(
        w, ranges.form, mode, DELTA=True
    )  # gradients of states have the decay after the writes in them
    scaled = scaled_tokens(r.to(tl.float32) * mode.scale, k, a, b, decays, mode)
    seen, below = causal(axes)
    start, end, passes = there.token[:, None], there.token[:, None], there.token
    read_r, read_a, written_k, written_b = scaled.r.state, scaled.a.state, scaled.k.high, scaled.b.high
    if mode.segments:
        # a chunk that is not there has no token, and hands on what comes; the one before it is read
        last = tl.minimum(n, (here.length - 1) // C)
        segments = chunk_segments(ranges.seg_, here, last)
        seen, below = together(segments, seen), together(segments, below)
        start, end, passes = reached(segments), reaching(segments), passing(segments) | (left <= 0)
        read_r, read_a = only(read_r, start), only(read_a, start)
        written_k, written_b = only(written_k, end), only(written_b, end)
    return Chunk(
        TokenTiles(r, k, a, b),
        decays,
        scaled,
        read_r,
        read_a,
        written_k,
        written_b,
        Masks(seen, below, start, end),
        Values(v, dy, U, dZ),
        passes,
        there,
    )


@triton.jit
def passed_on(x, chunk, mode: tl.constexpr):
    """``x`` [.., K] of the entering state, as it leaves ``chunk`` before the last decay, or the other way."""
    if mode.any_decay:
        x *= chunk.decays.pre
    if mode.segments:
        x = tl.where(chunk.passes, x, 0.0)
    return x


@triton.jit
def chunk_gradients(
    chunk,
    here,
    n,
    S,
    dS,
    passed,
    gradients,
    form,
    offsets,
    mode: tl.constexpr,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
):
    """`token_gradients` of the sequence's chunk ``n``."""
    token_gradients(
        chunk.tokens,
        chunk.decays,
        chunk.scaled,
        chunk.read_r,
        chunk.read_a,
        chunk.masks,
        score_gradients(chunk.value_tiles, form, mode),
        chunk.value_tiles,
        S,
        dS,
        passed=passed,
        gradients=advanced(gradients, ((here.first + n * C) * mode.H + tl.program_id(1)) * mode.K),
        form=form,
        offsets=offsets.key,
        there=chunk.there.key,
        mode=mode,
        READ=READ,
        WRITTEN=WRITTEN,
    )


@triton.jit
def pair_gradients(tokens, ranges, kept, here, n, axes, offsets, S_, dS_, gradients, mode: tl.constexpr):
    """The gradients of chunks ``n`` and ``n + 1`` from the state that enters the first and the gradient of
    that which leaves the second, or the first where there is no second.

    ``dS_`` may be where gradients go: all warps have read it before the first one is stored, for they wait
    for each other in the sum over values.
    """
    there = axes.has_value[:, None] & axes.has_key[None, :]
    S, dS = tl.load(S_, mask=there, other=0.0), tl.load(dS_, mask=there, other=0.0)
    passed = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)[None, :]
    S, dS = S.to(mode.operand), dS.to(mode.operand)
    first = load_chunk(tokens, ranges, kept, here, n, axes, offsets, mode)
    second = load_chunk(tokens, ranges, kept, here, n + 1, axes, offsets, mode)
    # the decay between the two; without a second one, whose tiles are zeros, dS has it already
    post = tl.where(here.length - n * C > C, first.decays.post, 1.0)[None, :]
    v, U, dy, dZ = first.value_tiles.v, first.value_tiles.U, second.value_tiles.dy, second.value_tiles.dZ
    rk = product(dy, tl.trans(v), mode)
    rb = product(dy, U, mode)
    if mode.any_decay:  # dZ and the gradients of states have been made of scaled cotangents
        up, _ = cotangent_scale(ranges.form)
        rk, rb = rk * up, rb * up
    rk, rb = rk.to(mode.operand), rb.to(mode.operand)
    ak = product(tl.trans(dZ), tl.trans(v), mode).to(mode.operand)
    ab = product(tl.trans(dZ), U, mode).to(mode.operand)

    # what the second chunk's rows read: of S, and of the first chunk's writes
    state_r = product(dy, S, mode)
    if mode.any_decay:
        state_r *= up
    state_a = product(tl.trans(dZ), S, mode)
    state_k = product(second.value_tiles.v, dS, mode)
    state_b = product(tl.trans(second.value_tiles.U), dS, mode)
    own = second.read_r.to(tl.float32) * state_r + second.read_a.to(tl.float32) * state_a
    passed_first = passed_on(passed_on(passed, second, mode) + tl.sum(own, 0)[None, :], first, mode) * post
    state_r, state_a = passed_on(state_r, first, mode), passed_on(state_a, first, mode)
    state_r = product(rk, first.written_k, mode, state_r)
    state_r = product(rb, first.written_b, mode, state_r) * post
    state_a = product(ak, first.written_k, mode, state_a)
    state_a = product(ab, first.written_b, mode, state_a) * post

    # what the first chunk's columns get: of dS, and of the second chunk's reads
    first_k = product(v, dS, mode)
    first_b = product(tl.trans(U), dS, mode)
    own = first.written_k.to(tl.float32) * first_k + first.written_b.to(tl.float32) * first_b
    passed_second = passed_on((passed_on(passed, first, mode) + tl.sum(own, 0)[None, :]) * post, second, mode)
    first_k, first_b = passed_on(first_k, second, mode), passed_on(first_b, second, mode)
    first_k = product(tl.trans(rk), second.read_r, mode, first_k)
    first_k = product(tl.trans(ak), second.read_a, mode, first_k) * post
    first_b = product(tl.trans(rb), second.read_r, mode, first_b)
    first_b = product(tl.trans(ab), second.read_a, mode, first_b) * post

    read, written, passed = (state_r, state_a), (state_k, state_b), tl.sum(passed_second, 0)
    chunk_gradients(
        second,
        here,
        n + 1,
        read,
        written,
        passed,
        gradients,
        ranges.form,
        offsets,
        mode=mode,
        READ=True,
        WRITTEN=True,
    )
    # loaded once more, so that nothing waits in registers meanwhile
    first = load_chunk(tokens, ranges, kept, here, n, axes, offsets, mode)
    S = tl.load(S_, mask=there, other=0.0).to(mode.operand)
    written, passed = (first_k, first_b), tl.sum(passed_first, 0)
    chunk_gradients(
        first,
        here,
        n,
        S,
        written,
        passed,
        gradients,
        ranges.form,
        offsets,
        mode=mode,
        READ=False,
        WRITTEN=True,
    )


@triton.jit
def block_gradients(
    tokens,
    ranges,
    owner_,
    kept,
    gradients,
    mode: tl.constexpr,
    BLOCKS: tl.constexpr,
    ARRAYS: tl.constexpr,
    EVERY: tl.constexpr,
    LEAVING: tl.constexpr,
    AT_ONCE: tl.constexpr = False,
    LATE: tl.constexpr = False,
):
    """The chunks that share a state, and one block of keys; ``mode.BK`` is the block's size here."""
    here, n = chunks_of_program(tl.program_id(0) // BLOCKS, owner_, ranges, EVERY, mode)
    if here.length > n * C:
        block = tl.program_id(0) % BLOCKS
        if EVERY == 1:
            one_gradients(
                tokens, ranges, kept, here, n, block, gradients, mode=mode, ARRAYS=ARRAYS, LEAVING=LEAVING
            )
        else:
            axes = tile_axes(block, 0, mode)
            offsets = chunk_offsets(axes, mode)
            pk = ((here.first + n * C) * mode.H + tl.program_id(1)) * mode.K
            S_ = state_rows((kept.states_,), 0, axes, mode, 0)
            S_ += state_place(ranges, here, n, pk, mode, 0, EVERY)
            dS_ = state_rows(kept.dstates, 0, axes, mode, ARRAYS)
            dS_ += state_place(ranges, here, n, pk, mode, ARRAYS, EVERY)
            if AT_ONCE:
                bounded_pair_gradients(
                    tokens, ranges, kept, here, n, axes, S_, dS_, gradients, mode=mode, LATE=LATE
                )
            else:
                pair_gradients(tokens, ranges, kept, here, n, axes, offsets, S_, dS_, gradients, mode=mode)


@triton.jit
def rwkv7_gradients_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    seg_,
    cu_,
    chunk0_,
    any_decay_,
    owner_,
    dy_,
    u_,
    dz_,
    states_,
    dstates0_,
    dstates1_,
    dstates2_,
    dstates3_,
    T,
    span,
    dr_,
    dw_,
    dk_,
    da_,
    db_,
    mode: tl.constexpr,
    BLOCKS: tl.constexpr,
    ARRAYS: tl.constexpr,
    TAKEN: tl.constexpr,
    EVERY: tl.constexpr,
    LEAVING: tl.constexpr,
    AT_ONCE: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Grid (states times ``BLOCKS`` of keys, heads, stretches), see `chunks_of_program`: after the carry
    kernel has stored dZ and the gradients of the states, one for ``EVERY`` chunks, one or two. ``AT_ONCE``
    says that two chunks are one tile in the bounded form, ``LEAVING`` that gradients of states come from the
    recurrent form (one_chunk.py). A thread has at most so many ``REGISTERS``, if not
    0 (run/lowering.py).
    """
    form = form_of(any_decay_, sequence_of_program(tl.program_id(0) // BLOCKS, owner_, mode), mode)
    tokens, ranges = Tokens(r_, w_, k_, v_, a_, b_), Ranges(seg_, cu_, chunk0_, T, span, form)
    dstates = (dstates0_, dstates1_, dstates2_, dstates3_)
    dr_, dk_, da_, db_ = gradients_over_states(dstates, (dr_, dk_, da_, db_), TAKEN)
    kept, out = Kept(dy_, u_, dz_, states_, dstates), Tokens(dr_, dw_, dk_, dy_, da_, db_)  # dv is there
    LATE: tl.constexpr = REGISTERS > 0
    if needs_any_decay(form, mode):
        block_gradients(
            tokens,
            ranges,
            owner_,
            kept,
            out,
            mode=mode,
            BLOCKS=BLOCKS,
            ARRAYS=ARRAYS,
            EVERY=EVERY,
            LEAVING=LEAVING,
        )
    else:
        block_gradients(
            tokens,
            ranges,
            owner_,
            kept,
            out,
            mode=bounded(mode),
            BLOCKS=BLOCKS,
            ARRAYS=ARRAYS,
            EVERY=EVERY,
            LEAVING=LEAVING,
            AT_ONCE=AT_ONCE,
            LATE=LATE,
        )
