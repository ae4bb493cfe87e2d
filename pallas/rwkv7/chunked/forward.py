"""RWKV-7, chunked forward in Triton: one program walks the chunks of one stretch of tokens, head and block of
values with the state in registers.

With G the log decays summed from the chunk's start (inclusive; Gx exclusive) and S [V, K] the state,
``U = T (A' S + A_ak V)``, ``Y = Q S + A_qk V + A_qb U``, ``S <- (S pre + V^T K + U^T B) post``
(docs/maths.md, section 3, derives it untransposed). The state is held as [V, K] so that it, V, U and Y are
left operands or accumulators of every product and never leave the registers.
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
    form_of,
    in_form,
    load_state,
    masked,
    needs_any_decay,
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
from ...device.kept_states import state_place, state_rows
from ...device.products import product
from ...device.tokens import load_tokens, store_tokens
from .scores import keep_scores, kept_scores, own_scores
from .tokens import Tokens, scaled_tokens


class Results(NamedTuple):
    """Where a walk writes: outputs, the last state; what is kept: states, scores, U."""

    y_: Any
    sT_: Any
    states: tuple[Any, ...]
    scores_: Any
    u_: Any


@triton.jit
def walk_forward(
    tokens,
    scores_,
    s0_,
    ranges,
    out,
    block,
    mode: tl.constexpr,
    KEEP: tl.constexpr = False,
    ARRAYS: tl.constexpr = 0,
    EVERY: tl.constexpr = 1,
    KEEP_U: tl.constexpr = False,
    GIVEN: tl.constexpr = True,
    READ: tl.constexpr = True,
    WRITE: tl.constexpr = True,
):
    """All chunks of one stretch, head and block of values. ``scores_`` has their scores where
    `Mode.scored`.

    The state starts as it is ``GIVEN``, else as zero. Without ``READ`` there are no outputs. Without
    ``WRITE`` there is no v, and the state starts as the identity.
    """
    h = tl.program_id(1)
    here = sequence(ranges, mode)
    axes = tile_axes(0, block, mode)
    incl, strict = causal(axes)
    head, tile = (tl.program_id(2) * mode.H + h).to(tl.int64), state_tile(axes, mode)
    if not WRITE:
        S = tl.where(axes.value[:, None] == axes.key[None, :], in_form(ranges.form, mode, False), 0.0)
    elif GIVEN:
        S = load_state(s0_, head, tile, ranges.form, mode)
    else:
        S = tl.full([mode.BV, mode.BK], 0.0, tl.float32)
    count = tl.cdiv(here.length, C)
    S = tl.where(count > 0, S, S * in_form(ranges.form, mode, True))
    offsets = chunk_offsets(axes, mode)
    pk, pv = (here.first * mode.H + h) * mode.K, (here.first * mode.H + h) * mode.V
    if KEEP:
        kept = state_rows(out.states, 0, axes, mode, ARRAYS)
    for n in range(0, count):
        left = here.length - n * C
        there = chunk_elements(left, axes)
        w = load_tokens(tokens.w_ + pk, offsets.spread, spread(there, mode), mode.even)
        r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even).to(tl.float32) * mode.scale
        k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even).to(tl.float32)
        a = load_tokens(tokens.a_ + pk, offsets.key, there.key, mode.even).to(tl.float32)
        b = load_tokens(tokens.b_ + pk, offsets.key, there.key, mode.even).to(tl.float32)
        if WRITE:
            vt = load_tokens(tokens.v_ + pv, offsets.turned, turned(there, axes), mode.even).to(mode.operand)
        decays = factors(w, ranges.form, mode, DELTA=True, SPREAD=True, last=n + 1 == count)
        scaled = scaled_tokens(r, k, a, b, decays, mode)
        seen, below = incl, strict
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            seen, below = together(segments, seen), together(segments, below)
        chunk = (here.chunk0 + n) * mode.H + h
        if mode.scored:
            A = kept_scores(scores_, chunk, mode)
        else:
            A = own_scores(scaled, seen, below, mode, READ=READ, WRITE=WRITE)
        read_r, read_a, written_k, written_b = scaled.r.state, scaled.a.state, scaled.k.high, scaled.b.high
        if mode.segments:
            start, end = tl.trans(reached(segments)), reaching(segments)
            written_k, written_b = masked(written_k, end, segments), masked(written_b, end, segments)
        state = S.to(mode.operand)
        if KEEP:
            at = kept + state_place(ranges, here, n, pk, mode, ARRAYS, EVERY)
            tl.store(at, state.to(out.states[0].dtype.element_ty), mask=tile.there & (n % EVERY == 0))
            if not mode.scored and block == 0:
                keep_scores(out.scores_, chunk, A)
        Z = product(state, tl.trans(read_a), mode)
        if mode.segments:
            Z = masked(Z, start, segments)
        if WRITE:
            Z = product(vt, tl.trans(A.ak), mode, Z)
        U = product(Z.to(mode.operand), tl.trans(A.inverse), mode).to(mode.operand)
        if KEEP_U:
            store_tokens(out.u_ + pv, offsets.turned, U, turned(there, axes), mode.even)
        if READ:
            Y = product(state, tl.trans(read_r), mode)
            if mode.segments:
                Y = masked(Y, start, segments)
            if WRITE:
                Y = product(vt, tl.trans(A.qk), mode, Y)
            Y = product(U, tl.trans(A.qb), mode, Y)
            store_tokens(out.y_ + pv, offsets.turned, Y, turned(there, axes), mode.even)
        if mode.segments:
            S = masked(S, passing(segments), segments)
        if mode.any_decay:
            S *= decays.pre[None, :]
        if WRITE:
            S = product(vt, written_k, mode, S)
        S = product(U, written_b, mode, S) * decays.post[None, :]
        pk += C * mode.H * mode.K
        pv += C * mode.H * mode.V
    store_state(out.sT_, head, S, tile, ranges.form, mode)


@triton.jit
def rwkv7_fwd_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    scores_,
    s0_,
    seg_,
    cu_,
    chunk0_,
    any_decay_,
    T,
    span,
    y_,
    sT_,
    states0_,
    states1_,
    states2_,
    states3_,
    made_,
    u_,
    mode: tl.constexpr,
    KEEP: tl.constexpr,
    ARRAYS: tl.constexpr,
    EVERY: tl.constexpr,
    KEEP_U: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences).

    ``KEEP`` stores what the backward needs: the states that enter chunks, in ``ARRAYS`` arrays
    (plan/kept_states.py), and the scores, where no kernel has made them; ``KEEP_U`` stores U, like v. Where
    the mode allows any decay, ``any_decay_`` [B, H] says which rows and heads need that form; the others take
    the bounded one.
    """
    block = tl.program_id(0)
    form = form_of(any_decay_, tl.program_id(2), mode)
    tokens, ranges = Tokens(r_, w_, k_, v_, a_, b_), Ranges(seg_, cu_, chunk0_, T, span, form)
    out = Results(y_, sT_, (states0_, states1_, states2_, states3_), made_, u_)
    if needs_any_decay(form, mode):
        walk_forward(
            tokens,
            scores_,
            s0_,
            ranges,
            out,
            block,
            mode=mode,
            KEEP=KEEP,
            ARRAYS=ARRAYS,
            EVERY=EVERY,
            KEEP_U=KEEP_U,
        )
    else:
        walk_forward(
            tokens,
            scores_,
            s0_,
            ranges,
            out,
            block,
            mode=bounded(mode),
            KEEP=KEEP,
            ARRAYS=ARRAYS,
            EVERY=EVERY,
            KEEP_U=KEEP_U,
        )
