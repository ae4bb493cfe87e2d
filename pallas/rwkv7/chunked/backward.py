"""RWKV-7, chunked backward in Triton: one program walks the chunks of one stretch, head and block of values
in reverse, the state's gradient in registers.

States and scores come from the forward; everything else is computed again. With
dS the gradient of the state that leaves the chunk, ``dU = A_qb^T dY + B' dS``, ``dZ = T^T dU``,
``dV = A_qk^T dY + K' dS + A_ak^T dZ``, ``dA = (dY, dZ) (V, U)^T``; then rows and columns (docs/maths.md,
section 5). All value-sided tiles are held transposed, [V, 16], as in the forward.

Heads of 65 to 128 numbers, in float32 all up to 128, take two kernels, for their tiles do not fit the
registers at once: the carry kernel walks only what the next chunk needs (dS, and dV and dZ with it), with
values split over programs, and stores dS, in 16 bits of every second chunk; large_heads.py (two chunks) and
one_chunk.py then have programs for these and blocks of keys.
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
    cotangent_scale,
    form_of,
    load_state,
    needs_any_decay,
    partial_sums,
    passing,
    reached,
    reaching,
    sequence,
    spread,
    state_tile,
    store_state,
    tile_axes,
    together,
    turned,
)
from ...device.decay import factors
from ...device.kept_states import gradients_over_states, state_place, state_rows
from ...device.products import product
from ...device.tokens import load_tokens, only, store_gradient, store_tokens
from .gradients import Masks, TokenTiles, Values, score_gradients, token_gradients
from .keys_as_rows import walk_backward_by_rows
from .scores import kept_scores
from .tokens import Tokens, advanced, scaled_tokens


class Given(NamedTuple):
    """What the backward reads besides tokens: cotangents of outputs and last state, kept states, scores."""

    dy_: Any
    dsT_: Any
    states: tuple[Any, ...]
    scores_: Any


class Results(NamedTuple):
    """Where a walk writes: gradients of tokens, of the first state, of states that leave chunks, dZ."""

    tokens: Tokens
    ds0_: Any
    dstates: tuple[Any, ...]
    dz_: Any


@triton.jit
def walk_backward(
    tokens,
    ranges,
    given,
    out,
    mode: tl.constexpr,
    FUSED: tl.constexpr,
    ARRAYS: tl.constexpr,
    EVERY: tl.constexpr = 1,
):
    """All chunks of one stretch, head and block of values, from the last to the first.

    With ``FUSED`` it makes all gradients, without only dV, dZ and the states' gradients, one for ``EVERY``
    chunks.
    """
    block, h = tl.program_id(0), tl.program_id(1)
    here = sequence(ranges, mode)
    axes = tile_axes(0, block, mode)
    incl, strict = causal(axes)
    head, tile = (tl.program_id(2) * mode.H + h).to(tl.int64), state_tile(axes, mode)
    dS = load_state(given.dsT_, head, tile, ranges.form, mode, GRADIENT=True)
    if mode.any_decay:
        up, down = cotangent_scale(ranges.form)
    else:
        down = 1.0
    offsets = chunk_offsets(axes, mode)
    count = tl.cdiv(here.length, C)
    pk = ((here.first + (count - 1) * C) * mode.H + h) * mode.K
    pv = ((here.first + (count - 1) * C) * mode.H + h) * mode.V
    part = partial_sums(block, ranges.T, mode)
    if FUSED:
        kept = state_rows(given.states, 0, axes, mode, ARRAYS)
    else:
        kept = state_rows(out.dstates, block, axes, mode, ARRAYS)
    for i in range(0, count):
        n = count - 1 - i
        left = here.length - n * C
        there = chunk_elements(left, axes)
        chunk = (here.chunk0 + n) * mode.H + h
        if FUSED:
            w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
        else:
            w = load_tokens(tokens.w_ + pk, offsets.spread, spread(there, mode), mode.even)
        r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even)
        k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even)
        a = load_tokens(tokens.a_ + pk, offsets.key, there.key, mode.even)
        b = load_tokens(tokens.b_ + pk, offsets.key, there.key, mode.even)
        if FUSED:
            dy = load_tokens(given.dy_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
            dyt = tl.trans(dy)
            v = load_tokens(tokens.v_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
            at = kept + state_place(ranges, here, n, pk, mode, ARRAYS, EVERY)
            S = tl.load(at, mask=tile.there, other=0.0).to(mode.operand)
        else:
            dyt = load_tokens(given.dy_ + pv, offsets.turned, turned(there, axes), mode.even).to(mode.operand)
        A = kept_scores(given.scores_, chunk, mode)
        decays = factors(w, ranges.form, mode, DELTA=True, SPREAD=not FUSED)
        scaled = scaled_tokens(r.to(tl.float32) * mode.scale, k, a, b, decays, mode)
        seen, below = incl, strict
        read_r, read_a, written_k, written_b = scaled.r.state, scaled.a.state, scaled.k.high, scaled.b.high
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            seen, below = together(segments, seen), together(segments, below)
            start, end = reached(segments), reaching(segments)
            read_r, read_a = only(read_r, start), only(read_a, start)
            written_k, written_b = only(written_k, end), only(written_b, end)
        else:
            start, end = there.token[:, None], there.token[:, None]
        if mode.any_decay:
            dyt *= up.to(mode.operand)
        dS *= decays.post[None, :]  # now the gradient of S pre + V^T K + U^T B
        dstate = dS.to(mode.operand)
        dU = product(dyt, A.qb, mode)
        dU = product(dstate, tl.trans(written_b), mode, dU)
        dZ = product(dU.to(mode.operand), A.inverse, mode).to(mode.operand)
        dV = product(dyt, A.qk, mode)
        dV = product(dstate, tl.trans(written_k), mode, dV)
        dV = product(dZ, A.ak, mode, dV)
        store_gradient(out.tokens.v_ + pv, offsets.turned, dV, down, turned(there, axes), mode)
        if FUSED:
            Z = product(S, tl.trans(read_a), mode)
            Z = product(tl.trans(v), tl.trans(A.ak), mode, Z)
            U = product(Z.to(mode.operand), tl.trans(A.inverse), mode).to(mode.operand)
        else:
            store_tokens(out.dz_ + pv, offsets.turned, dZ, turned(there, axes), mode.even)
            at = kept + state_place(ranges, here, n, pk, mode, ARRAYS, EVERY)
            last = ((n + 1) % EVERY == 0) | (i == 0)
            tl.store(at, dstate.to(out.dstates[0].dtype.element_ty), mask=tile.there & last)
        # the state that passes through
        if mode.any_decay:
            dS *= decays.pre[None, :]
        if mode.segments:
            dS = tl.where(passing(segments), dS, 0.0)
        if FUSED:
            at, values = part + pk, Values(v, dy, U, dZ)
            token_gradients(
                TokenTiles(r, k, a, b),
                decays,
                scaled,
                read_r,
                read_a,
                Masks(seen, below, start, end),
                score_gradients(values, ranges.form, mode),
                values,
                S,
                dstate,
                passed=tl.sum(S.to(tl.float32) * dS, 0),
                gradients=advanced(out.tokens, at),
                form=ranges.form,
                offsets=offsets.key,
                there=there.key,
                mode=mode,
            )
        dS = product(dyt, read_r, mode, dS)
        dS = product(dZ, read_a, mode, dS)
        pk -= C * mode.H * mode.K
        pv -= C * mode.H * mode.V
    store_state(out.ds0_, head, dS, tile, ranges.form, mode, GRADIENT=True)


@triton.jit
def rwkv7_bwd_kernel(
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
    dy_,
    dsT_,
    states0_,
    states1_,
    states2_,
    states3_,
    scores_,
    T,
    span,
    dr_,
    dw_,
    dk_,
    dv_,
    da_,
    db_,
    ds0_,
    mode: tl.constexpr,
    ARRAYS: tl.constexpr,
    TAKEN: tl.constexpr,
    KEYS_AS_ROWS: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences); ``any_decay_`` as in the forward.
    ``KEYS_AS_ROWS`` takes both forms from keys_as_rows.py.

    dr, dw, dk, da, db have a leading axis of value blocks, to be summed.
    """
    form = form_of(any_decay_, tl.program_id(2), mode)
    tokens, ranges = Tokens(r_, w_, k_, v_, a_, b_), Ranges(seg_, cu_, chunk0_, T, span, form)
    states = (states0_, states1_, states2_, states3_)
    dr_, dk_, da_, db_ = gradients_over_states(states, (dr_, dk_, da_, db_), TAKEN)
    given = Given(dy_, dsT_, states, scores_)
    out = Results(Tokens(dr_, dw_, dk_, dv_, da_, db_), ds0_, (ds0_,), ds0_)  # the last two are not written
    if KEYS_AS_ROWS:
        if needs_any_decay(form, mode):
            walk_backward_by_rows(tokens, ranges, given, out, mode=mode, ARRAYS=ARRAYS)
        else:
            walk_backward_by_rows(tokens, ranges, given, out, mode=bounded(mode), ARRAYS=ARRAYS)
    elif needs_any_decay(form, mode):
        walk_backward(tokens, ranges, given, out, mode=mode, FUSED=True, ARRAYS=ARRAYS)
    else:
        walk_backward(tokens, ranges, given, out, mode=bounded(mode), FUSED=True, ARRAYS=ARRAYS)


@triton.jit
def rwkv7_carry_kernel(
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
    dy_,
    dsT_,
    scores_,
    T,
    span,
    dv_,
    ds0_,
    dstates0_,
    dstates1_,
    dstates2_,
    dstates3_,
    dz_,
    mode: tl.constexpr,
    ARRAYS: tl.constexpr,
    EVERY: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences): dV, dZ like it, and the gradients of the
    states that leave every ``EVERY`` chunks, before their last decay, where device/kept_states.py has them.
    """
    form = form_of(any_decay_, tl.program_id(2), mode)
    tokens, ranges = Tokens(r_, w_, k_, v_, a_, b_), Ranges(seg_, cu_, chunk0_, T, span, form)
    given = Given(dy_, dsT_, (scores_,), scores_)
    dstates = (dstates0_, dstates1_, dstates2_, dstates3_)
    out = Results(Tokens(dv_, dv_, dv_, dv_, dv_, dv_), ds0_, dstates, dz_)  # of tokens only dv is written
    if needs_any_decay(form, mode):
        walk_backward(tokens, ranges, given, out, mode=mode, FUSED=False, ARRAYS=ARRAYS, EVERY=EVERY)
    else:
        walk_backward(
            tokens,
            ranges,
            given,
            out,
            mode=bounded(mode),
            FUSED=False,
            ARRAYS=ARRAYS,
            EVERY=EVERY,
        )
