"""What RWKV-7 makes of its projections before the recurrence, in one pass forward and one backward.

The maths is that of fla_jax/ops/layer/keys.py, in float32 whatever the arrays' dtypes; the backward computes
all values of the forward again. A head's sums over its channels stay within a few lanes.
"""

import triton
import triton.language as tl

from ..device.common import load_tokens, store_tokens
from ..device.heads import channels, partial_sum, share, sigmoid, vector


@triton.jit
def direction(k, k_k, EPS: tl.constexpr):
    """``k * k_k`` of length one, by head, the factor that made it so, and whether it has a direction."""
    raw = k * k_k
    square = tl.sum(raw * raw, 2, keep_dims=True)
    alive = square > EPS * EPS
    scale = tl.where(alive, tl.rsqrt(tl.where(alive, square, 1.0)), 1.0 / EPS)
    return raw * scale, scale, alive


@triton.jit
def keys_fwd_kernel(
    decay_, rate_, mix_, k_, v_, first_, w0_, a0_, v0_, k_k_, k_a_, residual_, T, span,
    w_, key_, value_, a_, b_, source_,
    H: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, RESIDUAL: tl.constexpr, CHOOSE: tl.constexpr,
    DECAY_SCALE: tl.constexpr, RATE_SCALE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: see `share`. ``RESIDUAL``: values are mixed, if ``residual_`` says so where ``CHOOSE``."""
    row, _place, head, start, end = share(T, span, H, BH)
    channel, there = channels(head, H, N, BH, BN)
    w0, a0 = vector(w0_, channel, there, EVEN), vector(a0_, channel, there, EVEN)
    k_k, k_a = vector(k_k_, channel, there, EVEN), vector(k_a_, channel, there, EVEN)
    if RESIDUAL:
        v0 = vector(v0_, channel, there, EVEN)
        chosen = tl.load(residual_) != 0 if CHOOSE else True
    t = tl.arange(0, BT)[:, None, None]
    offsets = t * (H * N) + channel
    for at in tl.range(start, end, BT, num_stages=STAGES):
        here = (row.to(tl.int64) * T + at) * (H * N)
        mask = there & (at + t < end)
        decay = load_tokens(decay_ + here, offsets, mask, EVEN)
        rate = load_tokens(rate_ + here, offsets, mask, EVEN)
        k = load_tokens(k_ + here, offsets, mask, EVEN)
        if RESIDUAL:
            mix = load_tokens(mix_ + here, offsets, mask, EVEN)
            v = load_tokens(v_ + here, offsets, mask, EVEN)
            first = load_tokens(first_ + here, offsets, mask, EVEN)
        k = k.to(tl.float32)
        store_tokens(w_ + here, offsets, DECAY_SCALE * sigmoid(w0 + decay.to(tl.float32)), mask, EVEN)
        rate = sigmoid(a0 + rate.to(tl.float32))
        kk, _scale, _alive = direction(k, k_k, EPS)
        store_tokens(a_ + here, offsets, -kk, mask, EVEN)
        store_tokens(b_ + here, offsets, kk * rate * RATE_SCALE, mask, EVEN)
        store_tokens(key_ + here, offsets, k * (1.0 + (rate - 1.0) * k_a), mask, EVEN)
        if RESIDUAL:
            v, first = v.to(tl.float32), first.to(tl.float32)
            if CHOOSE:
                first = tl.where(chosen, first, v)
                store_tokens(source_ + here, offsets, first, mask, EVEN)
            v += (first - v) * sigmoid(v0 + mix.to(tl.float32))
            store_tokens(value_ + here, offsets, v, mask, EVEN)


@triton.jit
def keys_bwd_kernel(
    decay_, rate_, mix_, k_, v_, first_, w0_, a0_, v0_, k_k_, k_a_, residual_,
    dw_, dkey_, dvalue_, da_, db_, dsource_, dkey_bonus_, dvalue_bonus_, T, span,
    ddecay_, drate_, dmix_, dk_, dv_, dfirst_, sums_,
    H: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, RESIDUAL: tl.constexpr, CHOOSE: tl.constexpr,
    DECAY_SCALE: tl.constexpr, RATE_SCALE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid and constants as in the forward; ``sums_`` [B, shares, 4 or 5, H, N] of w0, a0, k_k, k_a, v0."""
    COUNT: tl.constexpr = 5 if RESIDUAL else 4
    row, place, head, start, end = share(T, span, H, BH)
    channel, there = channels(head, H, N, BH, BN)
    w0, a0 = vector(w0_, channel, there, EVEN), vector(a0_, channel, there, EVEN)
    k_k, k_a = vector(k_k_, channel, there, EVEN), vector(k_a_, channel, there, EVEN)
    dw0, da0 = tl.zeros((BT, BH, BN), tl.float32), tl.zeros((BT, BH, BN), tl.float32)
    dk_k, dk_a = tl.zeros((BT, BH, BN), tl.float32), tl.zeros((BT, BH, BN), tl.float32)
    if RESIDUAL:
        v0, dv0 = vector(v0_, channel, there, EVEN), tl.zeros((BT, BH, BN), tl.float32)
        chosen = tl.load(residual_) != 0 if CHOOSE else True
    t = tl.arange(0, BT)[:, None, None]
    offsets = t * (H * N) + channel
    for at in tl.range(start, end, BT, num_stages=STAGES):
        here = (row.to(tl.int64) * T + at) * (H * N)
        mask = there & (at + t < end)
        decay = load_tokens(decay_ + here, offsets, mask, EVEN)
        dw = load_tokens(dw_ + here, offsets, mask, EVEN)
        rate = load_tokens(rate_ + here, offsets, mask, EVEN)
        k = load_tokens(k_ + here, offsets, mask, EVEN)
        dkey = load_tokens(dkey_ + here, offsets, mask, EVEN)
        dkey_bonus = load_tokens(dkey_bonus_ + here, offsets, mask, EVEN)
        da = load_tokens(da_ + here, offsets, mask, EVEN)
        db = load_tokens(db_ + here, offsets, mask, EVEN)
        if RESIDUAL:
            mix = load_tokens(mix_ + here, offsets, mask, EVEN)
            v = load_tokens(v_ + here, offsets, mask, EVEN)
            first = load_tokens(first_ + here, offsets, mask, EVEN)
            dvalue = load_tokens(dvalue_ + here, offsets, mask, EVEN)
            dvalue_bonus = load_tokens(dvalue_bonus_ + here, offsets, mask, EVEN)
            dsource = load_tokens(dsource_ + here, offsets, mask, EVEN)

        decay = sigmoid(w0 + decay.to(tl.float32))
        ddecay = dw.to(tl.float32) * (DECAY_SCALE * decay * (1.0 - decay))
        dw0 += ddecay
        store_tokens(ddecay_ + here, offsets, ddecay, mask, EVEN)

        rate, k = sigmoid(a0 + rate.to(tl.float32)), k.to(tl.float32)
        dkey = dkey.to(tl.float32) + dkey_bonus.to(tl.float32)
        kk, scale, alive = direction(k, k_k, EPS)
        db = db.to(tl.float32) * RATE_SCALE
        drate = (db * kk + dkey * k * k_a) * (rate * (1.0 - rate))
        da0 += drate
        store_tokens(drate_ + here, offsets, drate, mask, EVEN)
        dkk = db * rate - da.to(tl.float32)
        draw = tl.where(alive, (dkk - kk * tl.sum(kk * dkk, 2, keep_dims=True)) * scale, 0.0)
        dk_k += draw * k
        dk_a += dkey * k * (rate - 1.0)
        store_tokens(dk_ + here, offsets, dkey * (1.0 + (rate - 1.0) * k_a) + draw * k_k, mask, EVEN)

        if RESIDUAL:
            mix, v = sigmoid(v0 + mix.to(tl.float32)), v.to(tl.float32)
            dvalue = dvalue.to(tl.float32) + dvalue_bonus.to(tl.float32)
            dmix, dv = dvalue * (first.to(tl.float32) - v) * (mix * (1.0 - mix)), dvalue * (1.0 - mix)
            dfirst = dsource.to(tl.float32) + dvalue * mix
            if CHOOSE:
                dv = tl.where(chosen, dv, dv + dfirst)
                dmix, dfirst = tl.where(chosen, dmix, 0.0), tl.where(chosen, dfirst, 0.0)
            dv0 += dmix
            store_tokens(dmix_ + here, offsets, dmix, mask, EVEN)
            store_tokens(dv_ + here, offsets, dv, mask, EVEN)
            store_tokens(dfirst_ + here, offsets, dfirst, mask, EVEN)
    partial_sum(sums_, 0, COUNT, dw0, row, place, T, span, channel, there, H, N)
    partial_sum(sums_, 1, COUNT, da0, row, place, T, span, channel, there, H, N)
    partial_sum(sums_, 2, COUNT, dk_k, row, place, T, span, channel, there, H, N)
    partial_sum(sums_, 3, COUNT, dk_a, row, place, T, span, channel, there, H, N)
    if RESIDUAL:
        partial_sum(sums_, 4, COUNT, dv0, row, place, T, span, channel, there, H, N)
