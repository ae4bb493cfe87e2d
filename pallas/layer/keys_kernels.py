"""Inputs of RWKV-7's recurrence from a layer's projections. With f = sigmoid and kk = k k_k, per head::

    w = decay_scale f(w0 + decay),  gate = f(a0 + rate),  kk = kk / max(|kk|, eps),  a = -kk
    b = kk gate rate_scale,  k = k (1 + (gate - 1) k_a),  v = v + (v_first - v) f(v0 + mix)

in float32 for every dtype of the arrays (fla_jax/ops/layer/keys.py). The backward recomputes the forward. A
head's sums over its channels stay within a few lanes. Grid: `token_block`.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.headwise import (
    HeadwiseConfig,
    head_channels,
    load,
    load_vector,
    sigmoid,
    store,
    store_sum,
    tile_offsets,
    token_block,
    token_tile,
    zero_tile,
)


@dataclasses.dataclass(frozen=True)
class KeysConfig(HeadwiseConfig):
    """`HeadwiseConfig` with the op's constants."""

    decay_scale: float
    rate_scale: float
    eps: float


class FirstValues(NamedTuple):
    """Inputs of `first_values_kernel`: arrays of ``size`` elements, of which a program has ``block_len``."""

    v: Tensor
    v_first: Tensor
    residual: Tensor
    size: Tensor
    block_len: Tensor


class KeysOut(NamedTuple):
    """Outputs of the forward, None for those that equal an input."""

    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    v_first: Tensor


class KeysGrads(NamedTuple):
    """Gradients of the token arrays, and the blocks' sums for w0, a0, k_k, k_a and v0."""

    x: Tensor
    sums: Tensor


@triton.jit
def normalise(k, k_k, EPS: tl.constexpr):
    """``k * k_k`` scaled to length one, the scale, and whether the length exceeds ``EPS``."""
    raw = k * k_k
    square = tl.sum(raw * raw, 2, keep_dims=True)
    has_direction = square > EPS * EPS
    scale = tl.where(has_direction, tl.rsqrt(tl.where(has_direction, square, 1.0)), 1.0 / EPS)
    return raw * scale, scale, has_direction


@triton.jit
def sigmoid_pair(x):
    """sigmoid(x) and sigmoid(-x) of float32 ``x``, both to full relative precision."""
    # at 87 the exponential and its inverse are still normal numbers
    e = tl.exp(tl.minimum(-x, 87.0, propagate_nan=tl.PropagateNan.ALL))
    positive = 1.0 / (1.0 + e)
    return positive, e * positive


@triton.jit
def first_values_kernel(x, out, BLOCK: tl.constexpr):
    """Copies v to v_first in a layer without value residual, does nothing in the others. ``out`` is v_first.

    Grid: blocks of whole tiles of BLOCK elements.
    """
    if tl.load(x.residual) == 0:
        here = tl.program_id(0).to(tl.int64) * x.block_len + tl.arange(0, BLOCK)
        for at in tl.range(0, x.block_len, BLOCK):
            mask = here + at < x.size
            tl.store(x.v_first + here + at, tl.load(x.v + here + at, mask=mask), mask=mask)


@triton.jit
def keys_fwd_kernel(x, dims, out, c: tl.constexpr):
    """``x``: the op's inputs; v_first None: values are not mixed, residual None: always mixed."""
    block = token_block(dims, c)
    channels = head_channels(block, c)
    w0, a0 = load_vector(x.w0, channels, c), load_vector(x.a0, channels, c)
    k_k, k_a = load_vector(x.k_k, channels, c), load_vector(x.k_a, channels, c)
    if x.v_first is not None:
        v0 = load_vector(x.v0, channels, c)
        has_residual = tl.load(x.residual) != 0 if x.residual is not None else True
    offsets = tile_offsets(channels, c)
    for at in tl.range(block.start, block.end, c.BT, num_stages=c.stages):
        tile = token_tile(at, offsets, block, channels, dims, c)
        decay = load(x.decay + tile.base, tile, c)
        rate = load(x.rate + tile.base, tile, c)
        k = load(x.k + tile.base, tile, c)
        if x.v_first is not None:
            mix = load(x.mix + tile.base, tile, c)
            v = load(x.v + tile.base, tile, c)
            first = load(x.v_first + tile.base, tile, c)
        k = k.to(tl.float32)
        store(out.w + tile.base, tile, c.decay_scale * sigmoid(w0 + decay.to(tl.float32)), c)
        rate, one_minus_rate = sigmoid_pair(a0 + rate.to(tl.float32))
        kk, _, _ = normalise(k, k_k, c.eps)
        store(out.a + tile.base, tile, -kk, c)
        store(out.b + tile.base, tile, kk * rate * c.rate_scale, c)
        store(out.k + tile.base, tile, k * (rate + one_minus_rate * (1.0 - k_a)), c)
        if x.v_first is not None:
            v, first = v.to(tl.float32), first.to(tl.float32)
            mix, one_minus_mix = sigmoid_pair(v0 + mix.to(tl.float32))
            value = one_minus_mix * v + mix * first
            if x.residual is not None:
                value, first = tl.where(has_residual, value, v), tl.where(has_residual, first, v)
                store(out.v_first + tile.base, tile, first, c)
            store(out.v + tile.base, tile, value, c)


@triton.jit
def keys_bwd_kernel(x, do, dims, grads, c: tl.constexpr):
    """``do``: the cotangents of the op's results."""
    COUNT: tl.constexpr = 5 if x.v_first is not None else 4
    block = token_block(dims, c)
    channels = head_channels(block, c)
    w0, a0 = load_vector(x.w0, channels, c), load_vector(x.a0, channels, c)
    k_k, k_a = load_vector(x.k_k, channels, c), load_vector(x.k_a, channels, c)
    dw0, da0 = zero_tile(c), zero_tile(c)
    dk_k, dk_a = zero_tile(c), zero_tile(c)
    if x.v_first is not None:
        v0, dv0 = load_vector(x.v0, channels, c), zero_tile(c)
        has_residual = tl.load(x.residual) != 0 if x.residual is not None else True
    offsets = tile_offsets(channels, c)
    for at in tl.range(block.start, block.end, c.BT, num_stages=c.stages):
        tile = token_tile(at, offsets, block, channels, dims, c)
        decay = load(x.decay + tile.base, tile, c)
        dw = load(do.w + tile.base, tile, c)
        rate = load(x.rate + tile.base, tile, c)
        k = load(x.k + tile.base, tile, c)
        dk = load(do.k + tile.base, tile, c)
        dk_bonus = load(do.k_bonus + tile.base, tile, c)
        da = load(do.a + tile.base, tile, c)
        db = load(do.b + tile.base, tile, c)
        if x.v_first is not None:
            mix = load(x.mix + tile.base, tile, c)
            v = load(x.v + tile.base, tile, c)
            first = load(x.v_first + tile.base, tile, c)
            dv = load(do.v + tile.base, tile, c)
            dv_bonus = load(do.v_bonus + tile.base, tile, c)
            dv_first = load(do.v_first + tile.base, tile, c)

        decay, one_minus_decay = sigmoid_pair(w0 + decay.to(tl.float32))
        ddecay = dw.to(tl.float32) * (c.decay_scale * decay * one_minus_decay)
        dw0 += ddecay
        store(grads.x.decay + tile.base, tile, ddecay, c)

        rate, one_minus_rate = sigmoid_pair(a0 + rate.to(tl.float32))
        k = k.to(tl.float32)
        dk = dk.to(tl.float32) + dk_bonus.to(tl.float32)
        kk, scale, has_direction = normalise(k, k_k, c.eps)
        db = db.to(tl.float32) * c.rate_scale
        drate = (db * kk + dk * k * k_a) * (rate * one_minus_rate)
        da0 += drate
        store(grads.x.rate + tile.base, tile, drate, c)
        dkk = db * rate - da.to(tl.float32)
        draw = tl.where(has_direction, (dkk - kk * tl.sum(kk * dkk, 2, keep_dims=True)) * scale, 0.0)
        dk_k += draw * k
        dk_a -= dk * k * one_minus_rate
        store(grads.x.k + tile.base, tile, dk * (rate + one_minus_rate * (1.0 - k_a)) + draw * k_k, c)

        if x.v_first is not None:
            mix, one_minus_mix = sigmoid_pair(v0 + mix.to(tl.float32))
            v = v.to(tl.float32)
            dvalue = dv.to(tl.float32) + dv_bonus.to(tl.float32)
            dmix, dv = dvalue * (first.to(tl.float32) - v) * (mix * one_minus_mix), dvalue * one_minus_mix
            dfirst = dv_first.to(tl.float32) + dvalue * mix
            if x.residual is not None:
                dv = tl.where(has_residual, dv, dv + dfirst)
                dmix, dfirst = tl.where(has_residual, dmix, 0.0), tl.where(has_residual, dfirst, 0.0)
            dv0 += dmix
            store(grads.x.mix + tile.base, tile, dmix, c)
            store(grads.x.v + tile.base, tile, dv, c)
            store(grads.x.v_first + tile.base, tile, dfirst, c)
    store_sum(grads.sums, 0, COUNT, dw0, block, channels, dims, c)
    store_sum(grads.sums, 1, COUNT, da0, block, channels, dims, c)
    store_sum(grads.sums, 2, COUNT, dk_k, block, channels, dims, c)
    store_sum(grads.sums, 3, COUNT, dk_a, block, channels, dims, c)
    if x.v_first is not None:
        store_sum(grads.sums, 4, COUNT, dv0, block, channels, dims, c)
