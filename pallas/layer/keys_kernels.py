"""What RWKV-7 makes of its projections before the recurrence, in one pass forward and one backward.

The maths is that of fla_jax/ops/layer/keys.py, in float32 whatever the arrays' dtypes; the backward computes
all values of the forward again. A head's sums over its channels stay within a few lanes.
"""

import triton
import triton.language as tl

from ..common.headwise import channels, partial_sum, sigmoid, token_block, vector, zero_tile
from ..common.token_tiles import load_tokens, store_tokens


@triton.jit
def direction(k, k_k, EPS: tl.constexpr):
    """``k * k_k`` of length one, by head, the factor that made it so, and whether it has a direction."""
    raw = k * k_k
    square = tl.sum(raw * raw, 2, keep_dims=True)
    alive = square > EPS * EPS
    scale = tl.where(alive, tl.rsqrt(tl.where(alive, square, 1.0)), 1.0 / EPS)
    return raw * scale, scale, alive


@triton.jit
def gate(x):
    """The sigmoid of float32 ``x``, and one less it: each has all of its digits, however near to 0 it is."""
    # at 87 the exponential and its inverse are still normal numbers
    e = tl.exp(tl.minimum(-x, 87.0, propagate_nan=tl.PropagateNan.ALL))
    share = 1.0 / (1.0 + e)
    return share, e * share


@triton.jit
def first_values_kernel(v_, v_first_, residual_, size, span, source_, BLOCK: tl.constexpr):
    """Writes ``v_`` over ``v_first_`` at a layer that has no value residual, and nothing at any other.

    ``source_`` takes over the memory of ``v_first_``. Each program has ``span`` of ``size`` numbers, whole
    blocks.
    """
    if tl.load(residual_) == 0:
        here = tl.program_id(0).to(tl.int64) * span + tl.arange(0, BLOCK)
        for at in tl.range(0, span, BLOCK):
            mask = here + at < size
            tl.store(v_first_ + here + at, tl.load(v_ + here + at, mask=mask), mask=mask)


@triton.jit
def keys_fwd_kernel(
    decay_,
    rate_,
    mix_,
    k_,
    v_,
    v_first_,
    w0_,
    a0_,
    v0_,
    k_k_,
    k_a_,
    residual_,
    T,
    span,
    w_,
    key_,
    value_,
    a_,
    b_,
    source_,
    tiling: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHOOSE: tl.constexpr,
    DECAY_SCALE: tl.constexpr,
    RATE_SCALE: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid: see `token_block`. ``RESIDUAL``: values are mixed, if ``residual_`` says so where ``CHOOSE``."""
    mine = token_block(T, span, tiling)
    channel = channels(mine.head, tiling)
    w0, a0 = vector(w0_, channel, tiling), vector(a0_, channel, tiling)
    k_k, k_a = vector(k_k_, channel, tiling), vector(k_a_, channel, tiling)
    if RESIDUAL:
        v0 = vector(v0_, channel, tiling)
        chosen = tl.load(residual_) != 0 if CHOOSE else True
    t = tl.arange(0, tiling.BT)[:, None, None]
    offsets = t * (tiling.H * tiling.N) + channel.place
    for at in tl.range(mine.start, mine.end, tiling.BT, num_stages=tiling.stages):
        here = (mine.row.to(tl.int64) * T + at) * (tiling.H * tiling.N)
        mask = channel.there & (at + t < mine.end)
        decay = load_tokens(decay_ + here, offsets, mask, tiling.unmasked)
        rate = load_tokens(rate_ + here, offsets, mask, tiling.unmasked)
        k = load_tokens(k_ + here, offsets, mask, tiling.unmasked)
        if RESIDUAL:
            mix = load_tokens(mix_ + here, offsets, mask, tiling.unmasked)
            v = load_tokens(v_ + here, offsets, mask, tiling.unmasked)
            first = load_tokens(v_first_ + here, offsets, mask, tiling.unmasked)
        k = k.to(tl.float32)
        store_tokens(
            w_ + here, offsets, DECAY_SCALE * sigmoid(w0 + decay.to(tl.float32)), mask, tiling.unmasked
        )
        rate, rest = gate(a0 + rate.to(tl.float32))
        kk, _scale, _alive = direction(k, k_k, EPS)
        store_tokens(a_ + here, offsets, -kk, mask, tiling.unmasked)
        store_tokens(b_ + here, offsets, kk * rate * RATE_SCALE, mask, tiling.unmasked)
        store_tokens(key_ + here, offsets, k * (rate + rest * (1.0 - k_a)), mask, tiling.unmasked)
        if RESIDUAL:
            v, first = v.to(tl.float32), first.to(tl.float32)
            mix, own = gate(v0 + mix.to(tl.float32))
            value = own * v + mix * first
            if CHOOSE:
                value, first = tl.where(chosen, value, v), tl.where(chosen, first, v)
                store_tokens(source_ + here, offsets, first, mask, tiling.unmasked)
            store_tokens(value_ + here, offsets, value, mask, tiling.unmasked)


@triton.jit
def keys_bwd_kernel(
    decay_,
    rate_,
    mix_,
    k_,
    v_,
    v_first_,
    w0_,
    a0_,
    v0_,
    k_k_,
    k_a_,
    residual_,
    dw_,
    dkey_,
    dvalue_,
    da_,
    db_,
    dsource_,
    dkey_bonus_,
    dvalue_bonus_,
    T,
    span,
    ddecay_,
    drate_,
    dmix_,
    dk_,
    dv_,
    dv_first_,
    sums_,
    tiling: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHOOSE: tl.constexpr,
    DECAY_SCALE: tl.constexpr,
    RATE_SCALE: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid and constants as in the forward; ``sums_`` [B, shares, 4 or 5, H, N] of w0, a0, k_k, k_a, v0."""
    COUNT: tl.constexpr = 5 if RESIDUAL else 4
    mine = token_block(T, span, tiling)
    channel = channels(mine.head, tiling)
    w0, a0 = vector(w0_, channel, tiling), vector(a0_, channel, tiling)
    k_k, k_a = vector(k_k_, channel, tiling), vector(k_a_, channel, tiling)
    dw0, da0 = zero_tile(tiling), zero_tile(tiling)
    dk_k, dk_a = zero_tile(tiling), zero_tile(tiling)
    if RESIDUAL:
        v0, dv0 = vector(v0_, channel, tiling), zero_tile(tiling)
        chosen = tl.load(residual_) != 0 if CHOOSE else True
    t = tl.arange(0, tiling.BT)[:, None, None]
    offsets = t * (tiling.H * tiling.N) + channel.place
    for at in tl.range(mine.start, mine.end, tiling.BT, num_stages=tiling.stages):
        here = (mine.row.to(tl.int64) * T + at) * (tiling.H * tiling.N)
        mask = channel.there & (at + t < mine.end)
        decay = load_tokens(decay_ + here, offsets, mask, tiling.unmasked)
        dw = load_tokens(dw_ + here, offsets, mask, tiling.unmasked)
        rate = load_tokens(rate_ + here, offsets, mask, tiling.unmasked)
        k = load_tokens(k_ + here, offsets, mask, tiling.unmasked)
        dkey = load_tokens(dkey_ + here, offsets, mask, tiling.unmasked)
        dkey_bonus = load_tokens(dkey_bonus_ + here, offsets, mask, tiling.unmasked)
        da = load_tokens(da_ + here, offsets, mask, tiling.unmasked)
        db = load_tokens(db_ + here, offsets, mask, tiling.unmasked)
        if RESIDUAL:
            mix = load_tokens(mix_ + here, offsets, mask, tiling.unmasked)
            v = load_tokens(v_ + here, offsets, mask, tiling.unmasked)
            first = load_tokens(v_first_ + here, offsets, mask, tiling.unmasked)
            dvalue = load_tokens(dvalue_ + here, offsets, mask, tiling.unmasked)
            dvalue_bonus = load_tokens(dvalue_bonus_ + here, offsets, mask, tiling.unmasked)
            dsource = load_tokens(dsource_ + here, offsets, mask, tiling.unmasked)

        decay, rest = gate(w0 + decay.to(tl.float32))
        ddecay = dw.to(tl.float32) * (DECAY_SCALE * decay * rest)
        dw0 += ddecay
        store_tokens(ddecay_ + here, offsets, ddecay, mask, tiling.unmasked)

        rate, rest = gate(a0 + rate.to(tl.float32))
        k = k.to(tl.float32)
        dkey = dkey.to(tl.float32) + dkey_bonus.to(tl.float32)
        kk, scale, alive = direction(k, k_k, EPS)
        db = db.to(tl.float32) * RATE_SCALE
        drate = (db * kk + dkey * k * k_a) * (rate * rest)
        da0 += drate
        store_tokens(drate_ + here, offsets, drate, mask, tiling.unmasked)
        dkk = db * rate - da.to(tl.float32)
        draw = tl.where(alive, (dkk - kk * tl.sum(kk * dkk, 2, keep_dims=True)) * scale, 0.0)
        dk_k += draw * k
        dk_a -= dkey * k * rest
        store_tokens(
            dk_ + here, offsets, dkey * (rate + rest * (1.0 - k_a)) + draw * k_k, mask, tiling.unmasked
        )

        if RESIDUAL:
            mix, own = gate(v0 + mix.to(tl.float32))
            v = v.to(tl.float32)
            dvalue = dvalue.to(tl.float32) + dvalue_bonus.to(tl.float32)
            dmix, dv = dvalue * (first.to(tl.float32) - v) * (mix * own), dvalue * own
            dfirst = dsource.to(tl.float32) + dvalue * mix
            if CHOOSE:
                dv = tl.where(chosen, dv, dv + dfirst)
                dmix, dfirst = tl.where(chosen, dmix, 0.0), tl.where(chosen, dfirst, 0.0)
            dv0 += dmix
            store_tokens(dmix_ + here, offsets, dmix, mask, tiling.unmasked)
            store_tokens(dv_ + here, offsets, dv, mask, tiling.unmasked)
            store_tokens(dv_first_ + here, offsets, dfirst, mask, tiling.unmasked)
    partial_sum(sums_, 0, COUNT, dw0, mine, channel, tiling)
    partial_sum(sums_, 1, COUNT, da0, mine, channel, tiling)
    partial_sum(sums_, 2, COUNT, dk_k, mine, channel, tiling)
    partial_sum(sums_, 3, COUNT, dk_a, mine, channel, tiling)
    if RESIDUAL:
        partial_sum(sums_, 4, COUNT, dv0, mine, channel, tiling)
