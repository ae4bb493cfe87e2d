"""RWKV-7, chunked backward in the layout of `key_major`: a chunk under a safe gate."""

import triton
import triton.language as tl

from ..common.chunk import C, has_no_restart, masked
from ..common.decay import LOG2E
from ..common.dots import dot
from ..common.key_major import split2, sums_of_gradients, sums_of_pairs, sums_over_tokens, tile2
from ..common.token_tiles import select_row, store_gradient
from .chunk_bwd_key_major_tiles import scan_state


@triton.jit
def safe_gate_sums():
    """Matrices for `safe_gate_chunk`: the decays up to each token, for r, and up to the token before, for a,
    [16, 32]; and that of `sums_of_pairs`.
    """
    i, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    of_pairs, _ = sums_of_gradients()
    return tl.where(i + o // C <= o % C, 1.0, 0.0), of_pairs


@triton.jit
def safe_gate_chunk(x, segments, sums, dh, gate, places, value_place, c: tl.constexpr):
    """Stores the gradients of one chunk; returns the state's gradient at its start.

    ``x`` are its tiles. In this order of the statements no register is spilled.
    """
    grads = places.grads
    of_decays, of_pairs = sums
    j = tl.arange(0, C)[None, :]
    o = tl.arange(0, 2 * C)
    token, half = o % C, o // C
    is_r = half[None, :] == 0
    to, of = token[:, None], token[None, :]
    scale = tl.where(is_r, c.scale, 1.0)
    G = sums_over_tokens(x.w, of_decays, c) * LOG2E + gate
    gi = split2(G)[0]
    back = tl.exp2(-gi)
    decay_post = tl.exp2(tl.sum(tl.where(j == C - 1, gi, 0.0), 1) - gate)[:, None]
    # in shared memory, where products of a warp group read them, by products with the identity
    identity = tl.where(o[:, None] == o[None, :], 1.0, 0.0)
    raf, kbf = sums_over_tokens(x.ra, identity, c), sums_over_tokens(x.kb, identity, c)
    ra = (raf * (tl.exp2(G) * scale)).to(c.operand)
    kb = tl.trans(tl.trans(kbf * tile2(back)).to(c.operand))
    dh, dstate, dg_pass, do_pair, v_pair = scan_state(
        x, ra, kb, decay_post, decay_post, segments, dh, gate, places, value_place, c
    )

    # gradients of all four A, transposed: k, then b, down the tile
    dA = tl.trans(dot(tl.trans(do_pair), v_pair, c))
    pairs_there = of - to - half[None, :] >= 0
    if c.segments:
        pairs_there = has_no_restart(segments, to, of, pairs_there)
    dA = tl.where(pairs_there, dA, 0.0).to(c.operand)

    # the q side: through the state, and through the pairs of the chunk
    by_state = dot(x.h, do_pair, c)
    if c.segments:
        by_state = masked(by_state, of < segments.first, segments)
    by_pairs = dot(kb, dA, c, by_state)
    terms_r, terms_a = split2(ra.to(tl.float32) * by_pairs)
    # the decays again, from other sums than above: kept, they would take 16 registers
    again = tl.exp2(sums_over_tokens(x.w, -of_decays, c) * -LOG2E + gate)
    at = select_row(is_r, grads.r + places.start, grads.a + places.start, c.K)
    store_gradient(at, places.at_k, again * scale * by_pairs, places.scale, places.mask_k, c)

    # the k side: through the state, then through the pairs
    by_state = dot(dstate, v_pair, c)
    if c.segments:  # no branch: no product is fused with a sum across one
        by_state = tl.where(of >= segments.last, by_state, 0.0)
    through_k, through_b = split2(kb.to(tl.float32) * by_state)
    by_pairs = dot(ra, tl.trans(dA), c)
    terms_k, terms_b = split2(kb.to(tl.float32) * by_pairs)
    at = select_row(is_r, grads.k + places.start, grads.b + places.start, c.K)
    store_gradient(at, places.at_k, tile2(back) * (by_state + by_pairs), places.scale, places.mask_k, c)

    # decays: each token's terms, then the sums over tokens
    dg = terms_r - (terms_k + terms_b)
    pairs, dg_state = dg + terms_a, through_k + through_b
    dg = sums_of_pairs(pairs, dg_state, dg + dg_pass, of_pairs, c)
    store_gradient(grads.w + places.start, places.at_w, dg, places.scale, places.mask_w, c)
    return dh
