"""RWKV-7, chunked backward in Triton: the gradients of r, w, k, a, b of one chunk from the states and their
gradients at its ends.

The gradient of the log decay adds only terms that contain the decay in question (docs/maths.md, section 6):
rows through the entering state count for the tokens up to them, columns through the leaving state for the
tokens after them; pairs inside the chunk as row terms minus column terms from token j on, both from the same
rounded factors, so that what cancels, cancels to float32 rounding. In the form for any decay the pairs that
are not decayed at all (r with its own token, a with the one before) are taken apart. There the factors of
rows through the entering state are exact; all others are of clamped log decays, and their sum gets the true
factor of the decay in question back.
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
    needs_any_decay,
    passing,
    reached,
    reaching,
    sequence,
    tile_axes,
    together,
)
from ...device.decay import Columns, factors
from ...device.products import token_sums_f32
from ...device.tokens import load_tokens, only, store_tokens
from .tokens import Tokens, advanced, scaled_tokens


class TokenTiles(NamedTuple):
    """A chunk's tokens as they lie in memory, [16, K]."""

    r: Any
    k: Any
    a: Any
    b: Any


class Masks(NamedTuple):
    """Which tokens of a chunk hand what to whom.

    Attributes:
        seen: [16, 16] pairs t, i with i <= t that lie in one segment.
        below: [16, 16] those with i < t.
        start: [16, 1] tokens that the entering state reaches.
        end: [16, 1] tokens that reach the leaving state.
    """

    seen: Any
    below: Any
    start: Any
    end: Any


class Values(NamedTuple):
    """A chunk's value-sided tiles: v and dY [16, V], U and dZ held transposed [V, 16]."""

    v: Any
    dy: Any
    U: Any
    dZ: Any


@triton.jit
def row_gradient(dk, db, k, b, acc, mode: tl.constexpr):
    """``acc`` + gradients of scores times the columns ``k``, ``b``, each half of the rows with its own."""
    high = tl.dot(
        db, b.high, tl.dot(dk, k.high, acc, input_precision=mode.precision), input_precision=mode.precision
    )
    if mode.any_decay:
        low = tl.dot(
            db, b.low, tl.dot(dk, k.low, acc, input_precision=mode.precision), input_precision=mode.precision
        )
        return tl.where(tl.arange(0, 16)[:, None] < 8, low, high)
    else:
        return high


@triton.jit
def column_gradient(dr, da, r, a, LOW: tl.constexpr, mode: tl.constexpr):
    """Gradients of scores, transposed, times the rows ``r``, ``a`` [16, K]: of tokens 0..7 with ``LOW``, else
    8..15; in the bounded form of all.
    """
    if mode.any_decay:
        low = tl.arange(0, 16)[:, None] < 8
        keep = low if LOW else (tl.arange(0, 16)[:, None] >= 8)
        dr, da = only(dr, keep), only(da, keep)
    x = tl.dot(tl.trans(dr), r, input_precision=mode.precision)
    return tl.dot(tl.trans(da), a, x, input_precision=mode.precision)


@triton.jit
def token_gradients(
    tokens,
    decays,
    scaled,
    read_r,
    read_a,
    masks,
    values,
    S,
    dS,
    passed,
    gradients,
    offsets,
    there,
    mode: tl.constexpr,
):
    """Stores dr, dw, dk, da, db [16, K] of one chunk.

    ``read_r`` and ``read_a`` are the rows r and a that reach the entering state ``S`` [V, K]; ``dS`` is the
    gradient of ``S pre + V^T K + U^T B``. ``passed`` [K] is what reaches every decay through the state that
    passes the chunk.
    """
    t, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    dy, U = values.dy, values.U
    vt, Ut, dZt = tl.trans(values.v), tl.trans(U), tl.trans(values.dZ)
    dAqk = tl.dot(dy, vt, input_precision=mode.precision)
    dAqb = tl.dot(dy, U, input_precision=mode.precision)
    dAak = tl.dot(dZt, vt, input_precision=mode.precision)
    dAab = tl.dot(dZt, U, input_precision=mode.precision)
    dAqk, dAqb = only(dAqk, masks.seen).to(mode.operand), only(dAqb, masks.seen).to(mode.operand)
    dAak, dAab = only(dAak, masks.below).to(mode.operand), only(dAab, masks.below).to(mode.operand)
    if mode.any_decay:
        # pairs that are not decayed at all come apart: their size must not drown the rest of dw
        near_qk, near_qb = only(dAqk, t == j), only(dAqb, t == j)
        near_ak, near_ab = only(dAak, t == j + 1), only(dAab, t == j + 1)
        dAqk, dAqb = only(dAqk, t > j), only(dAqb, t > j)
        dAak, dAab = only(dAak, t > j + 1), only(dAab, t > j + 1)
        plain_k, plain_b = tokens.k.to(mode.operand), tokens.b.to(mode.operand)
        plain_r, plain_a = tokens.r.to(mode.operand), tokens.a.to(mode.operand)

    # rows: through the state, then with the pairs of the chunk
    state_r, state_a = (
        tl.dot(dy, S, input_precision=mode.precision),
        tl.dot(dZt, S, input_precision=mode.precision),
    )
    if mode.segments:
        state_r, state_a = tl.where(masks.start, state_r, 0.0), tl.where(masks.start, state_a, 0.0)
    if mode.any_decay:
        zero = tl.zeros(tokens.k.shape, tl.float32)
        pairs_r = row_gradient(dAqk, dAqb, scaled.k, scaled.b, zero, mode)
        pairs_a = row_gradient(dAak, dAab, scaled.k, scaled.b, zero, mode)
        reads_r, reads_a = read_r.to(tl.float32) * state_r, read_a.to(tl.float32) * state_a
        reads_both, reads_r = reads_r + reads_a, reads_r + passed[None, :]
        terms, terms_a = scaled.r.score.to(tl.float32) * pairs_r, scaled.a.score.to(tl.float32) * pairs_a
        k, b = Columns(plain_k, plain_k), Columns(plain_b, plain_b)
        dr = decays.state_incl * state_r + decays.score_incl * pairs_r
        dr += row_gradient(near_qk, near_qb, k, b, zero, bounded(mode))
        da = decays.state_excl * state_a + decays.score_excl * pairs_a
        da += row_gradient(near_ak, near_ab, k, b, zero, bounded(mode))
    else:
        pairs_r = row_gradient(dAqk, dAqb, scaled.k, scaled.b, state_r, mode)
        pairs_a = row_gradient(dAak, dAab, scaled.k, scaled.b, state_a, mode)
        terms, terms_a = scaled.r.score.to(tl.float32) * pairs_r, scaled.a.score.to(tl.float32) * pairs_a
        dr, da = decays.score_incl * pairs_r, decays.score_excl * pairs_a
    store_tokens(gradients.r_, offsets, dr * mode.scale, there, mode.even)
    store_tokens(gradients.a_, offsets, da, there, mode.even)
    if not mode.any_decay:
        terms += terms_a

    # columns: pairs of the chunk, then through the state
    state_k = tl.dot(values.v, dS, input_precision=mode.precision)
    state_b = tl.dot(Ut, dS, input_precision=mode.precision)
    if mode.segments:
        state_k, state_b = tl.where(masks.end, state_k, 0.0), tl.where(masks.end, state_b, 0.0)
    through = scaled.k.high.to(tl.float32) * state_k + scaled.b.high.to(tl.float32) * state_b
    pairs_k = column_gradient(dAqk, dAak, scaled.r.score, scaled.a.score, LOW=False, mode=mode)
    terms -= scaled.k.high.to(tl.float32) * pairs_k
    dk = decays.high * (pairs_k + state_k)
    pairs_b = column_gradient(dAqb, dAab, scaled.r.score, scaled.a.score, LOW=False, mode=mode)
    terms -= scaled.b.high.to(tl.float32) * pairs_b
    db = decays.high * (pairs_b + state_b)
    if mode.any_decay:
        pairs_k = column_gradient(dAqk, dAak, scaled.r.score, scaled.a.score, LOW=True, mode=mode)
        terms -= scaled.k.low.to(tl.float32) * pairs_k
        dk += decays.low * pairs_k
        pairs_b = column_gradient(dAqb, dAab, scaled.r.score, scaled.a.score, LOW=True, mode=mode)
        terms -= scaled.b.low.to(tl.float32) * pairs_b
        db += decays.low * pairs_b
        dk += undecayed(near_qk, near_ak, plain_r, plain_a, mode)
        db += undecayed(near_qb, near_ab, plain_r, plain_a, mode)
    store_tokens(gradients.k_, offsets, dk, there, mode.even)
    store_tokens(gradients.b_, offsets, db, there, mode.even)

    if mode.any_decay:
        dg = token_sums_f32(later, terms + terms_a, terms, mode)
        dg = decays.cut * token_sums_f32(earlier, through, dg, mode)
        dg = token_sums_f32(later, reads_both, dg + reads_r, mode)
    else:
        dg = passed[None, :] + tl.zeros(tokens.k.shape, tl.float32)
        dg -= terms_a
        dg = token_sums_f32(from_here, terms, dg, mode)
        dg = token_sums_f32(earlier, through, dg, mode)
    store_tokens(gradients.w_, offsets, dg, there, mode.even)


@triton.jit
def undecayed(near_r, near_a, r, a, mode: tl.constexpr):
    """What a column gets from the rows that it is not decayed for."""
    by_r = tl.dot(tl.trans(near_r), r, input_precision=mode.precision) * mode.scale
    return by_r + tl.dot(tl.trans(near_a), a, input_precision=mode.precision)


@triton.jit
def chunk_gradients(
    tokens, ranges, dy_, u_, dz_, states_, dstates_, gradients, mode: tl.constexpr, BLOCKS: tl.constexpr
):
    """One chunk and block of keys; ``mode.BK`` is the block's size here."""
    n, h = tl.program_id(0) // BLOCKS, tl.program_id(1)
    here = sequence(ranges, mode)
    left = here.length - n * C
    if left > 0:
        axes = tile_axes(tl.program_id(0) % BLOCKS, 0, mode)
        there = chunk_elements(left, axes)
        offsets = chunk_offsets(axes, mode)
        pk = ((here.first + n * C) * mode.H + h) * mode.K
        pv = ((here.first + n * C) * mode.H + h) * mode.V
        chunk = (here.chunk0 + n) * mode.H + h
        w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
        r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even)
        k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even)
        a = load_tokens(tokens.a_ + pk, offsets.key, there.key, mode.even)
        b = load_tokens(tokens.b_ + pk, offsets.key, there.key, mode.even)
        v = load_tokens(tokens.v_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
        dy = load_tokens(dy_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
        U = tl.trans(load_tokens(u_ + pv, offsets.value, there.value, mode.even).to(mode.operand))
        dZ = tl.trans(load_tokens(dz_ + pv, offsets.value, there.value, mode.even).to(mode.operand))
        at = chunk * (mode.K * mode.V) + axes.value[:, None] * mode.K + axes.key[None, :]
        there_state = axes.has_value[:, None] & axes.has_key[None, :]
        S = tl.load(states_ + at, mask=there_state, other=0.0)
        dS = tl.load(dstates_ + at, mask=there_state, other=0.0)
        decays = factors(w, mode, DELTA=True)  # dstates have the decay after the writes in them
        scaled = scaled_tokens(r.to(tl.float32) * mode.scale, k, a, b, decays, mode)
        seen, below = causal(axes)
        start, end = there.token[:, None], there.token[:, None]
        read_r, read_a = scaled.r.state, scaled.a.state
        passed = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        if mode.any_decay:
            passed *= decays.pre
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n, left)
            one = together(segments)
            seen, below = seen & one, below & one
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
            Values(v, dy, U, dZ),
            S.to(mode.operand),
            dS.to(mode.operand),
            passed=passed,
            gradients=advanced(gradients, pk),
            offsets=offsets.key,
            there=there.key,
            mode=mode,
        )


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
    dy_,
    u_,
    dz_,
    states_,
    dstates_,
    T,
    span,
    dr_,
    dw_,
    dk_,
    da_,
    db_,
    mode: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (chunks times ``BLOCKS`` of keys, heads, stretches or packed sequences), for large heads: after
    the carry kernel has stored dZ and the gradients of the states.
    """
    tokens, ranges = Tokens(r_, w_, k_, v_, a_, b_), Ranges(seg_, cu_, chunk0_, T, span)
    out = Tokens(dr_, dw_, dk_, dy_, da_, db_)  # dv is there already
    if needs_any_decay(any_decay_, mode):
        chunk_gradients(tokens, ranges, dy_, u_, dz_, states_, dstates_, out, mode=mode, BLOCKS=BLOCKS)
    else:
        chunk_gradients(
            tokens, ranges, dy_, u_, dz_, states_, dstates_, out, mode=bounded(mode), BLOCKS=BLOCKS
        )
