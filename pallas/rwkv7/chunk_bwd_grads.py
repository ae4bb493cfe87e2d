"""RWKV-7, chunked backward: gradients of r, w, k, a and b of one chunk from the states and state gradients
at its ends.

The gradient of a log decay sums only terms that contain that decay (docs/maths.md, section 6): the q side
through the state at the start counts for the tokens up to it, the k side through the state at the end for
the tokens after it, and pairs inside the chunk as q terms minus k terms from token j on, both from the same
rounded factors, so that they cancel to float32 rounding. Under an unsafe gate, pairs that are not decayed (r
with its own token, a with the one before) are computed apart, and the clamped factors of the other pairs are
replaced by exact ones in the sum.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk_config import with_safe_gate
from ..common.decay import Keys, in_first_half
from ..common.dots import dot, token_sums_f32
from ..common.gate import cotangent_scale
from ..common.token_tiles import store_gradient, where_or_zero


class TokenTiles(NamedTuple):
    """A chunk's tokens as loaded, [16, K]."""

    r: Tensor
    k: Tensor
    a: Tensor
    b: Tensor


class Masks(NamedTuple):
    """Masks of a chunk.

    Attributes:
        causal: [16, 16] pairs t, i of one segment with i <= t.
        strict: [16, 16] those with i < t.
        sees_h0: [16, 1] tokens before the first restart.
        reaches_ht: [16, 1] tokens from the last restart on.
    """

    causal: Tensor
    strict: Tensor
    sees_h0: Tensor
    reaches_ht: Tensor


class Values(NamedTuple):
    """A chunk's tiles of values: v and do [16, V], v_new and da_read transposed [V, 16]."""

    v: Tensor
    do: Tensor
    v_new: Tensor
    da_read: Tensor


@triton.jit
def A_gradients(values, gate, c: tl.constexpr):
    """Gradients of A_qk, A_qb, A_ak and A_ab, [16, 16], unmasked. ``values.do`` has no cotangent scale
    yet."""
    vt, da_read_t = tl.trans(values.v), tl.trans(values.da_read)
    qk = dot(values.do, vt, c)
    qb = dot(values.do, values.v_new, c)
    if c.unsafe_gate:
        do_scale, _ = cotangent_scale(gate)
        qk, qb = qk * do_scale, qb * do_scale
    return qk, qb, dot(da_read_t, vt, c), dot(da_read_t, values.v_new, c)


@triton.jit
def query_gradient(dk, db, k, b, acc, c: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """``acc`` plus gradients of A times ``k`` and ``b``, each half of the queries with its own k side."""
    second_half = dot(db, b.second_half, c, dot(dk, k.second_half, c, acc))
    if c.unsafe_gate:
        first_half = dot(db, b.first_half, c, dot(dk, k.first_half, c, acc))
        return tl.where(in_first_half(tl.arange(0, 16)[:, None], EXCLUSIVE), first_half, second_half)
    else:
        return second_half


@triton.jit
def key_gradient(dr, da, r, a, FIRST: tl.constexpr, c: tl.constexpr):
    """Transposed gradients of A times ``r`` and ``a`` [16, K]: under an unsafe gate of their first half if
    ``FIRST``, else of their second.
    """
    if c.unsafe_gate:
        t = tl.arange(0, 16)[:, None]
        dr = where_or_zero(dr, in_first_half(t, 0) == FIRST)
        da = where_or_zero(da, in_first_half(t, 1) == FIRST)
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
    grads,
    gate,
    offsets,
    mask,
    c: tl.constexpr,
    READS_GIVEN: tl.constexpr = False,
    WRITES_GIVEN: tl.constexpr = False,
):
    """Stores dr, dw, dk, da and db [16, K] of one chunk.

    Args:
        dA: `A_gradients`, unmasked.
        h: the state at the start [V, K]; if ``READS_GIVEN`` its products with do and da_read.
        dh: the gradient of ``h decay_pre + v^T kg + v_new^T bg``; if ``WRITES_GIVEN`` its products with v and
            v_new.
        dg_pass: [K], the gradient that every decay gets through the state that passes the chunk.
        grads: pointers to the gradients of the chunk's first token.
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
        # undecayed pairs apart: their size must not drown the rest of dw
        undecayed_qk, undecayed_qb = where_or_zero(dAqk, t == j), where_or_zero(dAqb, t == j)
        undecayed_ak, undecayed_ab = where_or_zero(dAak, t == j + 1), where_or_zero(dAab, t == j + 1)
        dAqk, dAqb = where_or_zero(dAqk, t > j), where_or_zero(dAqb, t > j)
        dAak, dAab = where_or_zero(dAak, t > j + 1), where_or_zero(dAab, t > j + 1)
        k_dots, b_dots = tokens.k.to(c.operand), tokens.b.to(c.operand)
        r_dots, a_dots = tokens.r.to(c.operand), tokens.a.to(c.operand)

    # the q side: through the state, then through the pairs of the chunk
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
    store_gradient(grads.r, offsets, dr * c.scale, grad_scale, mask, c)
    store_gradient(grads.a, offsets, da, grad_scale, mask, c)
    if not c.unsafe_gate:
        terms += terms_a

    # the k side: through the pairs of the chunk, then through the state
    if WRITES_GIVEN:
        state_k, state_b = dh
    else:
        state_k = dot(values.v, dh, c)
        state_b = dot(tl.trans(values.v_new), dh, c)
    if c.segments:
        state_k, state_b = tl.where(masks.reaches_ht, state_k, 0.0), tl.where(masks.reaches_ht, state_b, 0.0)
    dg_state = scaled.k.second_half.to(tl.float32) * state_k + scaled.b.second_half.to(tl.float32) * state_b
    pairs_k = key_gradient(dAqk, dAak, scaled.r.score, scaled.a.score, FIRST=False, c=c)
    terms -= scaled.k.second_half.to(tl.float32) * pairs_k
    dk = decays.second_half * (pairs_k + state_k)
    pairs_b = key_gradient(dAqb, dAab, scaled.r.score, scaled.a.score, FIRST=False, c=c)
    terms -= scaled.b.second_half.to(tl.float32) * pairs_b
    db = decays.second_half * (pairs_b + state_b)
    if c.unsafe_gate:
        pairs_k = key_gradient(dAqk, dAak, scaled.r.score, scaled.a.score, FIRST=True, c=c)
        terms -= scaled.k.first_half.to(tl.float32) * pairs_k
        dk += decays.first_half * pairs_k
        pairs_b = key_gradient(dAqb, dAab, scaled.r.score, scaled.a.score, FIRST=True, c=c)
        terms -= scaled.b.first_half.to(tl.float32) * pairs_b
        db += decays.first_half * pairs_b
        dk += undecayed_grads(undecayed_qk, undecayed_ak, r_dots, a_dots, c)
        db += undecayed_grads(undecayed_qb, undecayed_ab, r_dots, a_dots, c)
    store_gradient(grads.k, offsets, dk, grad_scale, mask, c)
    store_gradient(grads.b, offsets, db, grad_scale, mask, c)

    if c.unsafe_gate:
        dg = token_sums_f32(later, terms + terms_a, terms, c)
        dg = decays.clamp_ratio * token_sums_f32(earlier, dg_state, dg, c)
        dg = token_sums_f32(later, reads_both, dg + reads_r, c)
    else:
        dg = dg_pass[None, :] + tl.zeros(tokens.k.shape, tl.float32)
        dg -= terms_a
        dg = token_sums_f32(from_here, terms, dg, c)
        dg = token_sums_f32(earlier, dg_state, dg, c)
    store_gradient(grads.w, offsets, dg, grad_scale, mask, c)


@triton.jit
def undecayed_grads(undecayed_r, undecayed_a, r, a, c: tl.constexpr):
    """Gradient of a key from the queries that it is not decayed for."""
    by_r = dot(tl.trans(undecayed_r), r, c) * c.scale
    return by_r + dot(tl.trans(undecayed_a), a, c)
