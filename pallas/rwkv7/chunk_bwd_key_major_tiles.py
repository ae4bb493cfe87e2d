"""RWKV-7, chunked backward in the layout of `key_major`: the tiles of a chunk, where its gradients go, and
the scan of the state's gradient, which is the same under both gates.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import C, does_h0_reach_ht, masked
from ..common.dots import dot
from ..common.gate import cotangent_scale
from ..common.key_major import select_concat, split2, tile2
from ..common.token_tiles import store_gradient, where_or_zero
from .chunk_tokens import KeyGrads


class ChunkTiles(NamedTuple):
    """A chunk as loaded.

    Attributes:
        w: [K, 16].
        ra, kb: r beside a and k beside b, [K, 32].
        v, do: [16, V].
        h: the state at the start, [K, V].
        A_ab_inv, Aak: [16, 16].
        Aq: A_qk beside A_qb, [16, 32].
    """

    w: Tensor
    ra: Tensor
    kb: Tensor
    v: Tensor
    do: Tensor
    h: Tensor
    A_ab_inv: Tensor
    Aak: Tensor
    Aq: Tensor


class Places(NamedTuple):
    """Where gradients of a chunk are stored.

    Attributes:
        grads: pointers to the gradients.
        scale: under an unsafe gate what multiplies them, see `cotangent_scale`.
        start: offset of the chunk's first token in gradients of keys.
        at_k, at_w: offsets from there, of tiles [K, 32] and [K, 16].
        mask_k, mask_w: their elements that exist.
    """

    grads: KeyGrads
    scale: Tensor
    start: Tensor
    at_k: Tensor
    at_w: Tensor
    mask_k: Tensor
    mask_w: Tensor


class ValuePlace(NamedTuple):
    """Where the gradient of v is stored: pointer to the chunk's first token, and offsets [V, 16] from there
    and the mask of those that exist.
    """

    first: Tensor
    offsets: Tensor
    mask: Tensor


@triton.jit
def scan_state(x, read, keys, decay_post, total, segments, dh, gate, places, value_place, c: tl.constexpr):
    """Stores the gradient of v, and takes the state's gradient ``dh`` [K, V] from a chunk's end to its start.

    This order takes the fewest registers and lets products of a warp group overlap.

    Args:
        x: the chunk's tiles.
        read: r beside a times their decays from h0, under an unsafe gate masked to what sees h0, [K, 32].
        keys: k beside b times their decays to the end, without ``decay_post``, [K, 32].
        decay_post: the state's decay after the chunk's writes, [K, 1].
        total: its decay in the whole chunk, [K, 1].

    Returns:
        The gradient at the start; that at the end times ``decay_post``, as an operand; the sum over values of
        h times what passes the chunk, [K, 1]; do beside da_read, and v beside v_new, [V, 32].
    """
    j, o = tl.arange(0, C)[None, :], tl.arange(0, 2 * C)
    of, is_v = o[None, :] % C, o[:, None] < C
    do_t, vt = tl.trans(x.do), tl.trans(x.v)
    by_A = dot(do_t, x.Aq, c)
    if c.unsafe_gate:
        do_scale, _ = cotangent_scale(gate)
        by_A *= do_scale
    _, ag = split2(read)
    a_read = dot(tl.trans(x.h), ag, c)
    if c.segments and not c.unsafe_gate:
        a_read = masked(a_read, j < segments.first, segments)
        read = where_or_zero(read, of < segments.first)
    a_read = dot(vt, tl.trans(x.Aak), c, a_read)
    v_new = dot(a_read.to(c.operand), tl.trans(x.A_ab_inv), c).to(c.operand)
    v_pair = tl.trans(tl.where(is_v, tl.trans(tile2(vt)), tl.trans(tile2(v_new))))

    dstate = (dh * decay_post).to(c.operand)
    dh *= total
    dg_pass = tl.sum(x.h.to(tl.float32) * dh, 1)[:, None]
    if c.segments:
        dg_pass = tl.where(does_h0_reach_ht(segments), dg_pass, 0.0)
        dh = masked(dh, does_h0_reach_ht(segments), segments)
        writes = dot(tl.trans(dstate), keys, c)
        writes = masked(writes, of >= segments.last, segments) + by_A
    else:
        writes = dot(tl.trans(dstate), keys, c, by_A)
    dv, dv_new = split2(writes)
    da_read = dot(dv_new.to(c.operand), x.A_ab_inv, c).to(c.operand)
    do_pair = select_concat(do_t * do_scale.to(c.operand) if c.unsafe_gate else do_t, da_read)
    dh = dot(read, tl.trans(do_pair), c, dh)
    dv = dot(da_read, x.Aak, c, dv)
    store_gradient(value_place.first, value_place.offsets, dv, places.scale, value_place.mask, c)
    return dh, dstate, dg_pass, do_pair, v_pair
