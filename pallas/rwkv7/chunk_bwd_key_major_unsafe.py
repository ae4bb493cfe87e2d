"""RWKV-7, chunked backward in the layout of `key_major`: a chunk under an unsafe gate, with the factors of
`common.decay`. Its last steps also serve large heads (`chunk_bwd_split_pair_unsafe`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import C, has_no_restart, masked
from ..common.decay import LOG2E, LOG_FEW, LOG_MIN, LOG_ZERO, at_least, in_first_half, sums_to_middles
from ..common.dots import dot
from ..common.key_major import (
    concat,
    split2,
    sums_of_gradients,
    sums_of_pairs,
    sums_of_reads,
    sums_over_tokens,
    tile2,
    upper16,
)
from ..common.token_tiles import select_row, store_gradient, where_or_zero
from .chunk_bwd_key_major_tiles import scan_state


class Sums(NamedTuple):
    """Constant matrices of sums over tokens i for token s.

    Attributes:
        whole: up to s, for r, and up to the token before, for a, [16, 32].
        quarter: over the quarter of the chunk (`lowest_logs`), [16, 16].
        counted: for A, [16, 64]: from the middle of its half to s, for r, and to the token before, for a;
            then from s to the second middle and to the first, for the k side.
        pairs, reads: see `sums_of_gradients`.
    """

    whole: Tensor
    quarter: Tensor
    counted: Tensor
    pairs: Tensor
    reads: Tensor


@triton.jit
def unsafe_gate_sums():
    """The matrices."""
    i, o, s = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :], tl.arange(0, C)[None, :]
    whole = tl.where(i + o // C <= o % C, 1.0, 0.0)
    quarter = tl.where(i // 4 == s // 4, tl.where(i <= s, 1.0, 0.65625), 0.0)
    o = tl.arange(0, 4 * C)[None, :]
    part, s = o // C, o % C
    to_query, to_middle = sums_to_middles(i, s)
    before, _ = sums_to_middles(i, s - 1)
    counted = tl.where(
        part < 2, tl.where(part < 1, to_query, before), tl.where(part < 3, to_middle, -to_query)
    )
    pairs, reads = sums_of_gradients()
    return Sums(whole, quarter, counted, pairs, reads)


class Decays(NamedTuple):
    """Decay factors of a chunk, as in `DecayFactors`.

    Attributes:
        rows: of the q side for A, r times the scale, [K, 32].
        second_half, first_half: of the k side, [K, 16].
        total: of the state for the whole chunk, [K, 1].
        pre, post: of the state before and after the chunk's writes, [K, 1].
        clamp_ratio: [K, 16].
    """

    rows: Tensor
    second_half: Tensor
    first_half: Tensor
    total: Tensor
    pre: Tensor
    post: Tensor
    clamp_ratio: Tensor


@triton.jit
def unsafe_gate_decays(w, sums, c: tl.constexpr):
    """The factors of log decays ``w`` [K, 16].

    ``w`` is an operand of products only, here with the identity: Triton copies a load in the background if
    all its uses need one layout.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    plain = sums_over_tokens(at_least(w, LOG_ZERO), tl.where(i == j, 1.0, 0.0), c)
    quarter = sums_over_tokens(at_least(w, LOG_MIN), sums.quarter, c)
    counted = tl.maximum(plain, tl.where(quarter < -41.0, LOG_MIN, LOG_FEW))
    counted_w = upper16(counted.to(tl.int32, bitcast=True)) if w.dtype == tl.bfloat16 else counted
    R, columns = split2(sums_over_tokens(counted_w, sums.counted, c) * LOG2E)
    second_half, first_half = split2(columns)
    post = tl.sum(tl.where(j >= 12, counted, 0.0), 1)[:, None]
    whole = tl.sum(plain, 1)[:, None]
    total = tl.exp2(whole * LOG2E)
    first_half = tl.exp2(first_half)
    clamp_ratio = tl.exp2((plain - counted) * LOG2E)
    pre = tl.exp2((whole - post) * LOG2E)
    is_r = tl.arange(0, 2 * C)[None, :] < C
    rows, second_half = tl.exp2(R) * tl.where(is_r, c.scale, 1.0), tl.exp2(second_half)
    return Decays(rows, second_half, first_half, total, pre, tl.exp2(post * LOG2E), clamp_ratio)


@triton.jit
def decays_from_h0(w, sums, c: tl.constexpr):
    """Exact decays from the chunk's start, of r with and of a without its token's own, r times the scale,
    [K, 32].
    """
    is_r = tl.arange(0, 2 * C)[None, :] < C
    of_state = tl.exp2(sums_over_tokens(at_least(w, LOG_ZERO), sums.whole, c) * LOG2E)
    of_state *= tl.where(is_r, c.scale, 1.0)
    return of_state


@triton.jit
def unsafe_gate_chunk(x, segments, sums, dh, gate, places, value_place, c: tl.constexpr):
    """`safe_gate_chunk` under an unsafe gate."""
    of = tl.arange(0, 2 * C)[None, :] % C
    decays = unsafe_gate_decays(x.w, sums, c)
    raf = x.ra.to(tl.float32)
    scaled = scaled_tiles(raf, x.kb, decays, c)
    # not earlier: its exponents beside those of A would take too many registers
    of_state = decays_from_h0(x.w, sums, c)
    if c.segments:
        of_state = masked(of_state, of < segments.first, segments)
    read = (raf * of_state).to(c.operand)

    dh, dstate, dg_pass, do_pair, v_pair = scan_state(
        x, read, scaled.high_kb, decays.post, decays.total, segments, dh, gate, places, value_place, c
    )
    by_state = dot(x.h, do_pair, c)
    by_state *= of_state
    state_terms = terms_of_state(raf, by_state, dg_pass, sums, c)
    dA = tl.trans(dot(tl.trans(do_pair), v_pair, c))
    pairs = select_pairs(dA, segments, c)
    terms = query_gradients(x.kb, scaled, pairs, by_state, decays, places, c)
    by_state = dot(dstate, v_pair, c)
    key_and_decay_gradients(
        x.ra, scaled, pairs, by_state, terms, state_terms, decays, segments, sums, places, c
    )
    return dh


class ScaledTiles(NamedTuple):
    """Tiles [K, 32] times their decay factors: r and a for A; k and b for the second half's queries and the
    state at the end, and for the first half's.
    """

    score_ra: Tensor
    high_kb: Tensor
    low_kb: Tensor


@triton.jit
def scaled_tiles(raf, kb, decays, c: tl.constexpr):
    """The tiles, from r beside a in float32 and k beside b as loaded."""
    of = tl.arange(0, 2 * C)[None, :] % C
    kbf = kb.to(tl.float32)
    score_ra = (raf * decays.rows).to(c.operand)
    high_kb = tl.trans(tl.trans(kbf * tile2(decays.second_half)).to(c.operand))
    low_kb = tl.trans(tl.trans(tl.where(of < 8, kbf * tile2(decays.first_half), 0.0)).to(c.operand))
    return ScaledTiles(score_ra, high_kb, low_kb)


@triton.jit
def terms_of_state(raf, by_state, dg_pass, sums, c: tl.constexpr):
    """Gradient of the decays [K, 16] through the state at the start: of each token, what later tokens read
    and what passes the chunk.
    """
    terms_r, terms_a = split2(raf * by_state)
    both, terms_r = terms_r + terms_a, terms_r + dg_pass
    return sums_of_reads(both, terms_r, sums.reads, c)


class Pairs(NamedTuple):
    """Gradients of the four A, transposed: of k, then b, down, and of r, then a, across.

    Attributes:
        decayed: of pairs with a decay between, [64, 32]: with the k side of the second and of the first half.
        undecayed: of the others, [32, 32]. Their size must not drown the rest of dw.
    """

    decayed: Tensor
    undecayed: Tensor


@triton.jit
def select_pairs(dA, segments, c: tl.constexpr):
    """The pairs of unmasked gradients ``dA`` [32, 32]."""
    o = tl.arange(0, 2 * C)
    token, half = o % C, o // C
    to, of = token[:, None], token[None, :]
    # number of decays between k or b and r or a, negative for pairs of the future
    distance = of - to - half[None, :]
    pairs_there = distance >= 0
    if c.segments:
        pairs_there = has_no_restart(segments, to, of, pairs_there)
    scale = tl.where(half[None, :] == 0, c.scale, 1.0)
    undecayed = (tl.where(pairs_there & (distance == 0), dA, 0.0) * scale).to(c.operand)
    dA = tl.where(pairs_there & (distance > 0), dA, 0.0).to(c.operand)
    early = in_first_half(of, half[None, :])
    decayed = concat(tl.trans(tl.where(early, 0.0, dA).to(dA.dtype)), tl.trans(where_or_zero(dA, early)))
    return Pairs(tl.trans(decayed), undecayed)


@triton.jit
def query_gradients(kb, scaled, pairs, by_state, decays, places, c: tl.constexpr):
    """Stores the gradients of r and a; returns the terms of decays, [K, 16] of each.

    ``by_state`` [K, 32] are the gradients through the state at the start.
    """
    grads, is_r = places.grads, tl.arange(0, 2 * C)[None, :] < C
    by_pairs = dot(concat(scaled.high_kb, scaled.low_kb), pairs.decayed, c)
    terms = split2(scaled.score_ra.to(tl.float32) * by_pairs)
    grad = by_state + decays.rows * by_pairs
    grad = dot(kb.to(c.operand), pairs.undecayed, c, grad)
    at = select_row(is_r, grads.r + places.start, grads.a + places.start, c.K)
    store_gradient(at, places.at_k, grad, places.scale, places.mask_k, c)
    return terms


@triton.jit
def key_and_decay_gradients(
    ra, scaled, pairs, by_state, terms, state_terms, decays, segments, sums, places, c: tl.constexpr
):
    """Stores the gradients of k, b and w.

    ``by_state`` [K, 32] are products with the gradient of the state at the end; ``terms`` and ``state_terms``
    those of `query_gradients` and `terms_of_state`.
    """
    o = tl.arange(0, 2 * C)[None, :]
    grads, is_r, of = places.grads, o < C, o % C
    if c.segments:  # no branch: no product is fused with a sum across one
        by_state = tl.where(of >= segments.last, by_state, 0.0)
    through_k, through_b = split2(scaled.high_kb.to(tl.float32) * by_state)
    by_pairs, pairs_low = split2(dot(scaled.score_ra, tl.trans(pairs.decayed), c))
    k_terms = scaled.high_kb.to(tl.float32) * by_pairs
    grad = tile2(decays.second_half) * (by_state + by_pairs)
    k_terms = tl.where(of < 8, k_terms + scaled.low_kb.to(tl.float32) * pairs_low, k_terms)
    grad = tl.where(of < 8, grad + tile2(decays.first_half) * pairs_low, grad)
    grad = dot(ra.to(c.operand), tl.trans(pairs.undecayed), c, grad)
    at = select_row(is_r, grads.k + places.start, grads.b + places.start, c.K)
    store_gradient(at, places.at_k, grad, places.scale, places.mask_k, c)

    # decays: each token's terms, then the sums over tokens
    terms_r, terms_a = terms
    terms_k, terms_b = split2(k_terms)
    dg = terms_r - (terms_k + terms_b)
    dg = sums_of_pairs(dg + terms_a, through_k + through_b, dg, sums.pairs, c)
    dg = dg * decays.clamp_ratio + state_terms  # in place of the clamped decay the exact one
    store_gradient(grads.w + places.start, places.at_w, dg, places.scale, places.mask_w, c)
