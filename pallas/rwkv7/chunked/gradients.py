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

from ...device.chunk import bounded, cotangent_scale
from ...device.decay import Columns, in_first_half
from ...device.products import product, token_sums_f32
from ...device.tokens import only, store_gradient


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
def score_gradients(values, form, mode: tl.constexpr):
    """Gradients of the scores of r with k and b, and of a with k and b, [16, 16], of all pairs of tokens.

    Of ``values`` dY has no factor of the form yet.
    """
    vt, dZt = tl.trans(values.v), tl.trans(values.dZ)
    qk = product(values.dy, vt, mode)
    qb = product(values.dy, values.U, mode)
    if mode.any_decay:
        up, _ = cotangent_scale(form)
        qk, qb = qk * up, qb * up
    return qk, qb, product(dZt, vt, mode), product(dZt, values.U, mode)


@triton.jit
def row_gradient(dk, db, k, b, acc, mode: tl.constexpr, EXCL: tl.constexpr):
    """``acc`` + gradients of scores times the columns ``k``, ``b``, each half of the rows with its own."""
    high = product(db, b.high, mode, product(dk, k.high, mode, acc))
    if mode.any_decay:
        low = product(db, b.low, mode, product(dk, k.low, mode, acc))
        return tl.where(in_first_half(tl.arange(0, 16)[:, None], EXCL), low, high)
    else:
        return high


@triton.jit
def column_gradient(dr, da, r, a, LOW: tl.constexpr, mode: tl.constexpr):
    """Gradients of scores, transposed, times the rows ``r``, ``a`` [16, K]: of the first half of them with
    ``LOW``, else the second; in the bounded form of all.
    """
    if mode.any_decay:
        t = tl.arange(0, 16)[:, None]
        dr, da = only(dr, in_first_half(t, 0) == LOW), only(da, in_first_half(t, 1) == LOW)
    x = product(tl.trans(dr), r, mode)
    return product(tl.trans(da), a, mode, x)


@triton.jit
def token_gradients(
    tokens,
    decays,
    scaled,
    read_r,
    read_a,
    masks,
    dA,
    values,
    S,
    dS,
    passed,
    gradients,
    form,
    offsets,
    there,
    mode: tl.constexpr,
    READ: tl.constexpr = False,
    WRITTEN: tl.constexpr = False,
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
    if READ:
        state_r, state_a = S
    else:
        state_r, state_a = (
            product(values.dy, S, mode),
            product(tl.trans(values.dZ), S, mode),
        )
        if mode.any_decay:
            state_r *= cotangent_scale(form)[0]
    if mode.segments:
        state_r, state_a = tl.where(masks.start, state_r, 0.0), tl.where(masks.start, state_a, 0.0)
    if mode.any_decay:
        zero = tl.zeros(tokens.k.shape, tl.float32)
        pairs_r = row_gradient(dAqk, dAqb, scaled.k, scaled.b, zero, mode, EXCL=0)
        pairs_a = row_gradient(dAak, dAab, scaled.k, scaled.b, zero, mode, EXCL=1)
        reads_r, reads_a = read_r.to(tl.float32) * state_r, read_a.to(tl.float32) * state_a
        reads_both, reads_r = reads_r + reads_a, reads_r + passed[None, :]
        terms, terms_a = scaled.r.score.to(tl.float32) * pairs_r, scaled.a.score.to(tl.float32) * pairs_a
        k, b = Columns(plain_k, plain_k), Columns(plain_b, plain_b)
        dr = decays.state_incl * state_r + decays.score_incl * pairs_r
        dr += row_gradient(near_qk, near_qb, k, b, zero, bounded(mode), EXCL=0)
        da = decays.state_excl * state_a + decays.score_excl * pairs_a
        da += row_gradient(near_ak, near_ab, k, b, zero, bounded(mode), EXCL=1)
    else:
        pairs_r = row_gradient(dAqk, dAqb, scaled.k, scaled.b, state_r, mode, EXCL=0)
        pairs_a = row_gradient(dAak, dAab, scaled.k, scaled.b, state_a, mode, EXCL=1)
        terms, terms_a = scaled.r.score.to(tl.float32) * pairs_r, scaled.a.score.to(tl.float32) * pairs_a
        dr, da = decays.score_incl * pairs_r, decays.score_excl * pairs_a
    down = cotangent_scale(form)[1] if mode.any_decay else 1.0
    store_gradient(gradients.r_, offsets, dr * mode.scale, down, there, mode)
    store_gradient(gradients.a_, offsets, da, down, there, mode)
    if not mode.any_decay:
        terms += terms_a

    # columns: pairs of the chunk, then through the state
    if WRITTEN:
        state_k, state_b = dS
    else:
        state_k = product(values.v, dS, mode)
        state_b = product(tl.trans(values.U), dS, mode)
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
    store_gradient(gradients.k_, offsets, dk, down, there, mode)
    store_gradient(gradients.b_, offsets, db, down, there, mode)

    if mode.any_decay:
        dg = token_sums_f32(later, terms + terms_a, terms, mode)
        dg = decays.cut * token_sums_f32(earlier, through, dg, mode)
        dg = token_sums_f32(later, reads_both, dg + reads_r, mode)
    else:
        dg = passed[None, :] + tl.zeros(tokens.k.shape, tl.float32)
        dg -= terms_a
        dg = token_sums_f32(from_here, terms, dg, mode)
        dg = token_sums_f32(earlier, through, dg, mode)
    store_gradient(gradients.w_, offsets, dg, down, there, mode)


@triton.jit
def undecayed(near_r, near_a, r, a, mode: tl.constexpr):
    """What a column gets from the rows that it is not decayed for."""
    by_r = product(tl.trans(near_r), r, mode) * mode.scale
    return by_r + product(tl.trans(near_a), a, mode)
