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

from ..common.chunk import cotangent_scale, with_safe_gate
from ..common.decay import Keys, in_first_half
from ..common.dots import dot, token_sums_f32
from ..common.token_tiles import store_gradient, where_or_zero


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

    causal: Any
    strict: Any
    sees_h0: Any
    reaches_ht: Any


class Values(NamedTuple):
    """A chunk's value-sided tiles: v and dY [16, V], U and dZ held transposed [V, 16]."""

    v: Any
    do: Any
    v_new: Any
    da_read: Any


@triton.jit
def score_gradients(values, gate, c: tl.constexpr):
    """Gradients of the scores of r with k and b, and of a with k and b, [16, 16], of all pairs of tokens.

    Of ``values`` dY has no factor of the form yet.
    """
    vt, da_read_t = tl.trans(values.v), tl.trans(values.da_read)
    qk = dot(values.do, vt, c)
    qb = dot(values.do, values.v_new, c)
    if c.unsafe_gate:
        do_scale, _ = cotangent_scale(gate)
        qk, qb = qk * do_scale, qb * do_scale
    return qk, qb, dot(da_read_t, vt, c), dot(da_read_t, values.v_new, c)


@triton.jit
def query_gradient(dk, db, k, b, acc, c: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """``acc`` + gradients of scores times the columns ``k``, ``b``, each half of the rows with its own."""
    second_half = dot(db, b.second_half, c, dot(dk, k.second_half, c, acc))
    if c.unsafe_gate:
        first_half = dot(db, b.first_half, c, dot(dk, k.first_half, c, acc))
        return tl.where(in_first_half(tl.arange(0, 16)[:, None], EXCLUSIVE), first_half, second_half)
    else:
        return second_half


@triton.jit
def key_gradient(dr, da, r, a, LOW: tl.constexpr, c: tl.constexpr):
    """Gradients of scores, transposed, times the rows ``r``, ``a`` [16, K]: of the first half of them with
    ``LOW``, else the second; in the bounded form of all.
    """
    if c.unsafe_gate:
        t = tl.arange(0, 16)[:, None]
        dr, da = where_or_zero(dr, in_first_half(t, 0) == LOW), where_or_zero(da, in_first_half(t, 1) == LOW)
    x = dot(tl.trans(dr), r, c)
    return dot(tl.trans(da), a, c, x)


@triton.jit
def token_gradients(
    tokens,
    decays,
    scaled,
    qg,
    ag,
    masks,
    dA,
    values,
    h,
    dh,
    dg_pass,
    gradients,
    gate,
    offsets,
    mask,
    c: tl.constexpr,
    READS_GIVEN: tl.constexpr = False,
    WRITES_GIVEN: tl.constexpr = False,
):
    """Stores dr, dw, dk, da, db [16, K] of one chunk, from the gradients ``dA`` of its scores.

    ``read_r`` and ``read_a`` are the rows r and a that reach the entering state ``S`` [V, K]; ``dS`` is the
    gradient of ``S pre + V^T K + U^T B``. ``passed`` [K] is what reaches every decay through the state that
    passes the chunk; ``form`` has the scale of the cotangents (`cotangent_scale`). With ``READ`` ``S`` is not
    the state, but its products with (dY, dZ); with ``WRITTEN`` ``dS`` is those with (V, U).
    """
    t, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    dAqk, dAqb, dAak, dAab = dA
    dAqk, dAqb = (
        where_or_zero(dAqk, masks.causal).to(c.operand),
        where_or_zero(dAqb, masks.causal).to(c.operand),
    )
    dAak, dAab = (
        where_or_zero(dAak, masks.strict).to(c.operand),
        where_or_zero(dAab, masks.strict).to(c.operand),
    )
    if c.unsafe_gate:
        # pairs that are not decayed at all come apart: their size must not drown the rest of dw
        undecayed_qk, undecayed_qb = where_or_zero(dAqk, t == j), where_or_zero(dAqb, t == j)
        undecayed_ak, undecayed_ab = where_or_zero(dAak, t == j + 1), where_or_zero(dAab, t == j + 1)
        dAqk, dAqb = where_or_zero(dAqk, t > j), where_or_zero(dAqb, t > j)
        dAak, dAab = where_or_zero(dAak, t > j + 1), where_or_zero(dAab, t > j + 1)
        k_dots, b_dots = tokens.k.to(c.operand), tokens.b.to(c.operand)
        r_dots, a_dots = tokens.r.to(c.operand), tokens.a.to(c.operand)

    # rows: through the state, then with the pairs of the chunk
    if READS_GIVEN:
        state_r, state_a = h
    else:
        state_r, state_a = (
            dot(values.do, h, c),
            dot(tl.trans(values.da_read), h, c),
        )
        if c.unsafe_gate:
            state_r *= cotangent_scale(gate)[0]
    if c.segments:
        state_r, state_a = tl.where(masks.sees_h0, state_r, 0.0), tl.where(masks.sees_h0, state_a, 0.0)
    if c.unsafe_gate:
        zero = tl.zeros(tokens.k.shape, tl.float32)
        pairs_r = query_gradient(dAqk, dAqb, scaled.k, scaled.b, zero, c, EXCLUSIVE=0)
        pairs_a = query_gradient(dAak, dAab, scaled.k, scaled.b, zero, c, EXCLUSIVE=1)
        reads_r, reads_a = qg.to(tl.float32) * state_r, ag.to(tl.float32) * state_a
        reads_both, reads_r = reads_r + reads_a, reads_r + dg_pass[None, :]
        terms, terms_a = scaled.r.score.to(tl.float32) * pairs_r, scaled.a.score.to(tl.float32) * pairs_a
        k, b = Keys(k_dots, k_dots), Keys(b_dots, b_dots)
        dr = decays.state_gi * state_r + decays.score_gi * pairs_r
        dr += query_gradient(undecayed_qk, undecayed_qb, k, b, zero, with_safe_gate(c), EXCLUSIVE=0)
        da = decays.state_ge * state_a + decays.score_ge * pairs_a
        da += query_gradient(undecayed_ak, undecayed_ab, k, b, zero, with_safe_gate(c), EXCLUSIVE=1)
    else:
        pairs_r = query_gradient(dAqk, dAqb, scaled.k, scaled.b, state_r, c, EXCLUSIVE=0)
        pairs_a = query_gradient(dAak, dAab, scaled.k, scaled.b, state_a, c, EXCLUSIVE=1)
        terms, terms_a = scaled.r.score.to(tl.float32) * pairs_r, scaled.a.score.to(tl.float32) * pairs_a
        dr, da = decays.score_gi * pairs_r, decays.score_ge * pairs_a
    grad_scale = cotangent_scale(gate)[1] if c.unsafe_gate else 1.0
    store_gradient(gradients.r_, offsets, dr * c.scale, grad_scale, mask, c)
    store_gradient(gradients.a_, offsets, da, grad_scale, mask, c)
    if not c.unsafe_gate:
        terms += terms_a

    # columns: pairs of the chunk, then through the state
    if WRITES_GIVEN:
        state_k, state_b = dh
    else:
        state_k = dot(values.v, dh, c)
        state_b = dot(tl.trans(values.v_new), dh, c)
    if c.segments:
        state_k, state_b = tl.where(masks.reaches_ht, state_k, 0.0), tl.where(masks.reaches_ht, state_b, 0.0)
    dg_state = scaled.k.second_half.to(tl.float32) * state_k + scaled.b.second_half.to(tl.float32) * state_b
    pairs_k = key_gradient(dAqk, dAak, scaled.r.score, scaled.a.score, LOW=False, c=c)
    terms -= scaled.k.second_half.to(tl.float32) * pairs_k
    dk = decays.second_half * (pairs_k + state_k)
    pairs_b = key_gradient(dAqb, dAab, scaled.r.score, scaled.a.score, LOW=False, c=c)
    terms -= scaled.b.second_half.to(tl.float32) * pairs_b
    db = decays.second_half * (pairs_b + state_b)
    if c.unsafe_gate:
        pairs_k = key_gradient(dAqk, dAak, scaled.r.score, scaled.a.score, LOW=True, c=c)
        terms -= scaled.k.first_half.to(tl.float32) * pairs_k
        dk += decays.first_half * pairs_k
        pairs_b = key_gradient(dAqb, dAab, scaled.r.score, scaled.a.score, LOW=True, c=c)
        terms -= scaled.b.first_half.to(tl.float32) * pairs_b
        db += decays.first_half * pairs_b
        dk += undecayed_grads(undecayed_qk, undecayed_ak, r_dots, a_dots, c)
        db += undecayed_grads(undecayed_qb, undecayed_ab, r_dots, a_dots, c)
    store_gradient(gradients.k_, offsets, dk, grad_scale, mask, c)
    store_gradient(gradients.b_, offsets, db, grad_scale, mask, c)

    if c.unsafe_gate:
        dg = token_sums_f32(later, terms + terms_a, terms, c)
        dg = decays.clamp_ratio * token_sums_f32(earlier, dg_state, dg, c)
        dg = token_sums_f32(later, reads_both, dg + reads_r, c)
    else:
        dg = dg_pass[None, :] + tl.zeros(tokens.k.shape, tl.float32)
        dg -= terms_a
        dg = token_sums_f32(from_here, terms, dg, c)
        dg = token_sums_f32(earlier, dg_state, dg, c)
    store_gradient(gradients.w_, offsets, dg, grad_scale, mask, c)


@triton.jit
def undecayed_grads(undecayed_r, undecayed_a, r, a, c: tl.constexpr):
    """What a column gets from the rows that it is not decayed for."""
    by_r = dot(tl.trans(undecayed_r), r, c) * c.scale
    return by_r + dot(tl.trans(undecayed_a), a, c)
