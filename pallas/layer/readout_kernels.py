"""What a layer makes of its recurrence's output, in one pass forward and one backward.

The maths is that of fla_jax/ops/layer/readout.py, in float32 whatever the arrays' dtypes; the backward
computes all values of the forward again. A head's sums over its channels stay within a few lanes.
"""

import triton
import triton.language as tl

from ..common.headwise import channels, partial_sum, sigmoid, token_block, vector, zero_tile
from ..common.token_tiles import load_tokens, store_tokens


@triton.jit
def normalised(o, there, tiling: tl.constexpr, EPS: tl.constexpr):
    """``o`` less its mean over the head's channels, divided by its deviation, and one over that."""
    centred = tl.where(there, o - tl.sum(o, 2, keep_dims=True) * (1.0 / tiling.N), 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 2, keep_dims=True) * (1.0 / tiling.N) + EPS)
    return centred * rstd, rstd


@triton.jit
def readout_fwd_kernel(
    o_,
    gate_,
    r_,
    k_,
    v_,
    scale_,
    bias_,
    r_k_,
    T,
    span,
    y_,
    tiling: tl.constexpr,
    BONUS: tl.constexpr,
    SILU: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid: see `token_block`."""
    mine = token_block(T, span, tiling)
    channel = channels(mine.head, tiling)
    scale, bias = vector(scale_, channel, tiling), vector(bias_, channel, tiling)
    if BONUS:
        r_k = vector(r_k_, channel, tiling)
    t = tl.arange(0, tiling.BT)[:, None, None]
    offsets = t * (tiling.H * tiling.N) + channel.place
    for at in tl.range(mine.start, mine.end, tiling.BT, num_stages=tiling.stages):
        here = (mine.row.to(tl.int64) * T + at) * (tiling.H * tiling.N)
        mask = channel.there & (at + t < mine.end)
        o = load_tokens(o_ + here, offsets, mask, tiling.unmasked)
        gate = load_tokens(gate_ + here, offsets, mask, tiling.unmasked)
        if BONUS:
            r = load_tokens(r_ + here, offsets, mask, tiling.unmasked)
            k = load_tokens(k_ + here, offsets, mask, tiling.unmasked)
            v = load_tokens(v_ + here, offsets, mask, tiling.unmasked)
        normal, _rstd = normalised(o.to(tl.float32), channel.there, tiling, EPS)
        y, gate = normal * scale + bias, gate.to(tl.float32)
        if BONUS:
            y += tl.sum(r.to(tl.float32) * k.to(tl.float32) * r_k, 2, keep_dims=True) * v.to(tl.float32)
        if SILU:
            gate *= sigmoid(gate)
        store_tokens(y_ + here, offsets, y * gate, mask, tiling.unmasked)


@triton.jit
def readout_bwd_kernel(
    o_,
    gate_,
    r_,
    k_,
    v_,
    scale_,
    bias_,
    r_k_,
    dy_,
    T,
    span,
    do_,
    dgate_,
    dr_,
    dk_,
    dv_,
    sums_,
    tiling: tl.constexpr,
    BONUS: tl.constexpr,
    SILU: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid and constants as in the forward; ``sums_`` [B, shares, 2 or 3, H, N] of scale, bias, r_k."""
    COUNT: tl.constexpr = 3 if BONUS else 2
    mine = token_block(T, span, tiling)
    channel = channels(mine.head, tiling)
    scale, bias = vector(scale_, channel, tiling), vector(bias_, channel, tiling)
    dscale, dbias = zero_tile(tiling), zero_tile(tiling)
    if BONUS:
        r_k, dr_k = vector(r_k_, channel, tiling), zero_tile(tiling)
    t = tl.arange(0, tiling.BT)[:, None, None]
    offsets = t * (tiling.H * tiling.N) + channel.place
    for at in tl.range(mine.start, mine.end, tiling.BT, num_stages=tiling.stages):
        here = (mine.row.to(tl.int64) * T + at) * (tiling.H * tiling.N)
        mask = channel.there & (at + t < mine.end)
        o = load_tokens(o_ + here, offsets, mask, tiling.unmasked)
        gate = load_tokens(gate_ + here, offsets, mask, tiling.unmasked)
        dy = load_tokens(dy_ + here, offsets, mask, tiling.unmasked)
        if BONUS:
            r = load_tokens(r_ + here, offsets, mask, tiling.unmasked)
            k = load_tokens(k_ + here, offsets, mask, tiling.unmasked)
            v = load_tokens(v_ + here, offsets, mask, tiling.unmasked)
        normal, rstd = normalised(o.to(tl.float32), channel.there, tiling, EPS)
        y, gate, dy = normal * scale + bias, gate.to(tl.float32), dy.to(tl.float32)
        if BONUS:
            r, k, v = r.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
            bonus = tl.sum(r * k * r_k, 2, keep_dims=True)
            y += bonus * v
        dgate = dy * y
        if SILU:
            s = sigmoid(gate)
            dgate *= s * (1.0 + gate * (1.0 - s))
            gate *= s
        store_tokens(dgate_ + here, offsets, dgate, mask, tiling.unmasked)
        dy *= gate  # from here on the cotangent of what the gate multiplies
        if BONUS:
            dbonus = tl.sum(dy * v, 2, keep_dims=True)
            store_tokens(dv_ + here, offsets, dy * bonus, mask, tiling.unmasked)
            store_tokens(dr_ + here, offsets, dbonus * k * r_k, mask, tiling.unmasked)
            store_tokens(dk_ + here, offsets, dbonus * r * r_k, mask, tiling.unmasked)
            dr_k += dbonus * r * k
        dscale += dy * normal
        dbias += dy
        dy *= scale
        mean, slope = (
            tl.sum(dy, 2, keep_dims=True) * (1.0 / tiling.N),
            tl.sum(dy * normal, 2, keep_dims=True) * (1.0 / tiling.N),
        )
        store_tokens(do_ + here, offsets, (dy - mean - normal * slope) * rstd, mask, tiling.unmasked)
    partial_sum(sums_, 0, COUNT, dscale, mine, channel, tiling)
    partial_sum(sums_, 1, COUNT, dbias, mine, channel, tiling)
    if BONUS:
        partial_sum(sums_, 2, COUNT, dr_k, mine, channel, tiling)
