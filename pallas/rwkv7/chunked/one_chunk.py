"""RWKV-7, chunked backward in Triton: the gradients of r, w, k, a, b of one chunk and a block of keys, where
the forward and the carry kernel keep states and their gradients for every chunk: with float32 operands.

All that values have to do with it is sums over them, so these are taken a block at a time.
"""

import triton
import triton.language as tl

from ...device.chunk import (
    C,
    causal,
    chunk_elements,
    chunk_offsets,
    chunk_segments,
    in_form,
    passing,
    reached,
    reaching,
    tile_axes,
    together,
)
from ...device.decay import factors
from ...device.kept_states import state_place, state_rows
from ...device.products import product
from ...device.tokens import load_tokens, only
from .gradients import Masks, TokenTiles, Values, score_gradients, token_gradients
from .tokens import advanced, scaled_tokens


@triton.jit
def sums_over_values(
    tokens,
    ranges,
    kept,
    here,
    n,
    key_block,
    pk,
    pv,
    mode: tl.constexpr,
    ARRAYS: tl.constexpr,
    LEAVING: tl.constexpr,
):
    """The gradients of scores, not masked; the products of (dY, dZ) with the state that enters, and of (V, U)
    with the gradient of that which leaves; and the sum of the two states' products, [K].
    """
    zero, zero_k = tl.full([C, C], 0.0, tl.float32), tl.full([C, mode.BK], 0.0, tl.float32)
    qk, qb, ak, ab = zero, zero, zero, zero
    state_r, state_a, state_k, state_b = zero_k, zero_k, zero_k, zero_k
    passed = tl.full([mode.BK], 0.0, tl.float32)
    for block in range(0, tl.cdiv(mode.V, mode.BV)):
        axes = tile_axes(key_block, block, mode)
        at, there = chunk_offsets(axes, mode).value, chunk_elements(here.length - n * C, axes).value
        v = load_tokens(tokens.v_ + pv, at, there, mode.even).to(mode.operand)
        dy = load_tokens(kept.dy_ + pv, at, there, mode.even).to(mode.operand)
        U = tl.trans(load_tokens(kept.u_ + pv, at, there, mode.even).to(mode.operand))
        dZ = tl.trans(load_tokens(kept.dz_ + pv, at, there, mode.even).to(mode.operand))
        if mode.any_decay and LEAVING:
            dZ *= in_form(ranges.form, mode, True)
        both = axes.has_value[:, None] & axes.has_key[None, :]
        S_ = state_rows((kept.states_,), block, axes, mode, 0) + state_place(ranges, here, n, pk, mode, 0, 1)
        dS_ = state_rows(kept.dstates, block, axes, mode, ARRAYS)
        dS_ += state_place(ranges, here, n, pk, mode, ARRAYS, 1)
        S, dS = tl.load(S_, mask=both, other=0.0), tl.load(dS_, mask=both, other=0.0)
        dA = score_gradients(Values(v, dy, U, dZ), ranges.form, mode)
        qk, qb, ak, ab = qk + dA[0], qb + dA[1], ak + dA[2], ab + dA[3]
        passed += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        S, dS = S.to(mode.operand), dS.to(mode.operand)
        state_r = product(dy, S, mode, state_r)
        state_a = product(tl.trans(dZ), S, mode, state_a)
        state_k = product(v, dS, mode, state_k)
        state_b = product(tl.trans(U), dS, mode, state_b)
    if mode.any_decay:
        state_r *= in_form(ranges.form, mode, True)
    return (qk, qb, ak, ab), (state_r, state_a), (state_k, state_b), passed


@triton.jit
def one_gradients(
    tokens,
    ranges,
    kept,
    here,
    n,
    key_block,
    gradients,
    mode: tl.constexpr,
    ARRAYS: tl.constexpr,
    LEAVING: tl.constexpr,
):
    """The gradients of the sequence's chunk ``n``. With ``LEAVING`` the kept gradients of states are of those
    that leave chunks, after their last decay.

    Gradients of states may lie where those of tokens go: all warps have read them before the first is stored.
    """
    h = tl.program_id(1)
    pk = ((here.first + n * C) * mode.H + h) * mode.K
    pv = ((here.first + n * C) * mode.H + h) * mode.V
    dA, read, written, passed = sums_over_values(
        tokens, ranges, kept, here, n, key_block, pk, pv, mode, ARRAYS, LEAVING
    )
    tl.debug_barrier()
    axes = tile_axes(key_block, 0, mode)
    offsets, there = chunk_offsets(axes, mode), chunk_elements(here.length - n * C, axes)
    w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
    r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even)
    k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even)
    a = load_tokens(tokens.a_ + pk, offsets.key, there.key, mode.even)
    b = load_tokens(tokens.b_ + pk, offsets.key, there.key, mode.even)
    decays = factors(
        w, ranges.form, mode, DELTA=True
    )  # gradients of states have the decay after the writes in them
    scaled = scaled_tokens(r.to(tl.float32) * mode.scale, k, a, b, decays, mode)
    seen, below = causal(axes)
    start, end = there.token[:, None], there.token[:, None]
    read_r, read_a = scaled.r.state, scaled.a.state
    if LEAVING:
        # what the walks of the recurrent form have made has no factor of the form; that one first, then the
        # decay: so neither leaves float32's range
        back, post = in_form(ranges.form, mode, True), decays.post[None, :]
        written, passed = (written[0] * back * post, written[1] * back * post), passed * back * decays.post
        if not mode.any_decay:
            state = in_form(ranges.form, mode, False)
            read, passed = (read[0] * state, read[1] * state), passed * state
    if mode.any_decay:
        passed *= decays.pre
    if mode.segments:
        segments = chunk_segments(ranges.seg_, here, n)
        seen, below = together(segments, seen), together(segments, below)
        start, end = reached(segments), reaching(segments)
        read_r, read_a = only(read_r, start), only(read_a, start)
        passed = tl.where(passing(segments), passed, 0.0)
    token_gradients(
        TokenTiles(r, k, a, b),
        decays,
        scaled,
        read_r,
        read_a,
        Masks(seen, below, start, end),
        dA,
        None,
        read,
        written,
        passed=passed,
        gradients=advanced(gradients, pk),
        form=ranges.form,
        offsets=offsets.key,
        there=there.key,
        mode=mode,
        READ=True,
        WRITTEN=True,
    )
