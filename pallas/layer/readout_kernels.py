"""Readout of the recurrence's output in one pass: a group norm over each head, RWKV-7's bonus, the gate::

    n = (o - mean(o)) / sqrt(var(o) + eps),   y = (n scale + bias + sum(r k r_k) v) gate

with silu(gate) instead of gate, and no bonus, for RWKV-6; in float32 for every dtype of the arrays
(fla_jax/ops/layer/readout.py). The backward recomputes the forward. A head's sums over its channels stay
within a few lanes. Grid: `token_block`.
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
class ReadoutConfig(HeadwiseConfig):
    """`HeadwiseConfig` with the op's constants."""

    silu: bool
    eps: float


class ReadoutGrads(NamedTuple):
    """Gradients of the token arrays, and the blocks' sums for scale, bias and r_k."""

    x: Tensor
    sums: Tensor


@triton.jit
def normalise(o, mask, c: tl.constexpr):
    """``o`` with mean 0 and variance 1 over the head's channels, and the factor that scaled it."""
    centred = tl.where(mask, o - tl.sum(o, 2, keep_dims=True) * (1.0 / c.N), 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 2, keep_dims=True) * (1.0 / c.N) + c.eps)
    return centred * rstd, rstd


@triton.jit
def readout_fwd_kernel(x, dims, out, c: tl.constexpr):
    """``x``: the op's inputs (`ReadoutInputs`), ``out``: `Readout`."""
    block = token_block(dims, c)
    channels = head_channels(block, c)
    scale, bias = load_vector(x.scale, channels, c), load_vector(x.bias, channels, c)
    if x.r_k is not None:
        r_k = load_vector(x.r_k, channels, c)
    offsets = tile_offsets(channels, c)
    for at in tl.range(block.start, block.end, c.BT, num_stages=c.stages):
        tile = token_tile(at, offsets, block, channels, dims, c)
        o = load(x.o + tile.base, tile, c)
        gate = load(x.gate + tile.base, tile, c)
        if x.r_k is not None:
            r = load(x.r + tile.base, tile, c)
            k = load(x.k + tile.base, tile, c)
            v = load(x.v + tile.base, tile, c)
        normal, _rstd = normalise(o.to(tl.float32), channels.mask, c)
        y, gate = normal * scale + bias, gate.to(tl.float32)
        if x.r_k is not None:
            y += tl.sum(r.to(tl.float32) * k.to(tl.float32) * r_k, 2, keep_dims=True) * v.to(tl.float32)
        if c.silu:
            gate *= sigmoid(gate)
        store(out.y + tile.base, tile, y * gate, c)


@triton.jit
def readout_bwd_kernel(x, do, dims, grads, c: tl.constexpr):
    """``do``: the cotangent of the result (`Readout`)."""
    COUNT: tl.constexpr = 3 if x.r_k is not None else 2
    block = token_block(dims, c)
    channels = head_channels(block, c)
    scale, bias = load_vector(x.scale, channels, c), load_vector(x.bias, channels, c)
    dscale, dbias = zero_tile(c), zero_tile(c)
    if x.r_k is not None:
        r_k, dr_k = load_vector(x.r_k, channels, c), zero_tile(c)
    offsets = tile_offsets(channels, c)
    for at in tl.range(block.start, block.end, c.BT, num_stages=c.stages):
        tile = token_tile(at, offsets, block, channels, dims, c)
        o = load(x.o + tile.base, tile, c)
        gate = load(x.gate + tile.base, tile, c)
        dy = load(do.y + tile.base, tile, c)
        if x.r_k is not None:
            r = load(x.r + tile.base, tile, c)
            k = load(x.k + tile.base, tile, c)
            v = load(x.v + tile.base, tile, c)
        normal, rstd = normalise(o.to(tl.float32), channels.mask, c)
        y, gate, dy = normal * scale + bias, gate.to(tl.float32), dy.to(tl.float32)
        if x.r_k is not None:
            r, k, v = r.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
            bonus = tl.sum(r * k * r_k, 2, keep_dims=True)
            y += bonus * v
        dgate = dy * y
        if c.silu:
            s = sigmoid(gate)
            dgate *= s * (1.0 + gate * (1.0 - s))
            gate *= s
        store(grads.x.gate + tile.base, tile, dgate, c)
        dy *= gate  # from here on the cotangent of what the gate multiplies
        if x.r_k is not None:
            dbonus = tl.sum(dy * v, 2, keep_dims=True)
            store(grads.x.v + tile.base, tile, dy * bonus, c)
            store(grads.x.r + tile.base, tile, dbonus * k * r_k, c)
            store(grads.x.k + tile.base, tile, dbonus * r * r_k, c)
            dr_k += dbonus * r * k
        dscale += dy * normal
        dbias += dy
        dy *= scale
        mean, slope = (
            tl.sum(dy, 2, keep_dims=True) * (1.0 / c.N),
            tl.sum(dy * normal, 2, keep_dims=True) * (1.0 / c.N),
        )
        store(grads.x.o + tile.base, tile, (dy - mean - normal * slope) * rstd, c)
    store_sum(grads.sums, 0, COUNT, dscale, block, channels, dims, c)
    store_sum(grads.sums, 1, COUNT, dbias, block, channels, dims, c)
    if x.r_k is not None:
        store_sum(grads.sums, 2, COUNT, dr_k, block, channels, dims, c)
