"""RWKV-6's decoded token: the mixed inputs of its products, and the step of a head::

    x_n = x + (last - x) (mu_n + W_n z_n)
    g = -exp(w0 + W w),   o = r^T h + sum(r k u) v,   h = diag(exp(g)) h + k v^T
    y = group_norm(o) silu(gate)

Grids: (tiles of channels, 5 mixes, B), and (heads, B).
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from .gemv import load, sigmoid
from .head_step import StepConfig, group_norm, load_vector, store_shifts


@dataclasses.dataclass(frozen=True)
class RWKV6StepConfig(StepConfig):
    """`StepConfig` with the rank of the decay's second stage, and that padded to a power of two."""

    R: int
    BR: int


class RWKV6Params(NamedTuple):
    """Parameters of a layer: [C] each, and the decay's second stage [C, R], None if its result is given."""

    second: jax.Array | None
    base: jax.Array
    bonus: jax.Array
    scale: jax.Array
    bias: jax.Array


@triton.jit
def rwkv6_kernel(x, p, state, out, c: tl.constexpr):
    """``x.projections``: r, k, v, gate, then the decay's rank. ``out.state`` has the memory of ``state``."""
    B: tl.constexpr = c.B
    N: tl.constexpr = c.N
    C: tl.constexpr = c.H * N
    head = tl.program_id(0)
    channel = head * N + tl.arange(0, N)
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    base, bonus = load_vector(p.base, channel), load_vector(p.bonus, channel)
    scale, bias = load_vector(p.scale, channel), load_vector(p.bias, channel)
    b = tl.program_id(1)
    tile_start = ((((x.layer - 3) // 2) * B + b) * c.H + head).to(tl.int64) * (N * N)
    h = tl.load(state.wkv + tile_start + tile).to(tl.float32)
    token = x.projections + b * c.width
    r, k, v = (
        load_vector(token, channel),
        load_vector(token + C, channel),
        load_vector(token + 2 * C, channel),
    )
    gate = load_vector(token + 3 * C, channel)
    active = tl.load(x.active + b) != 0
    here = b * C + channel
    att_shift, ffn_shift = tl.load(x.att_shift + here), tl.load(x.ffn_shift + here)
    if x.second is None:
        rank = tl.arange(0, c.BR)
        inside = (rank < c.R)[None, :]
        w = tl.load(p.second + channel[:, None] * c.R + rank[None, :], mask=inside, other=0.0)
        low = tl.load(token + 4 * C + rank, mask=rank < c.R, other=0.0)
        decay = tl.sum(w.to(tl.float32) * low[None, :], 1)
    else:
        decay = load_vector(x.second + b * C, channel)
    # exp(-exp(20)) is 0 already
    decay = tl.exp(-tl.exp(tl.minimum(base + decay, 20.0)))
    o = tl.sum(h * r[:, None], 0) + tl.sum(r * k * bonus, 0) * v
    h = h * decay[:, None] + k[:, None] * v[None, :]
    tl.store(state.wkv + tile_start + tile, h.to(state.wkv.dtype.element_ty), mask=active)
    o = group_norm(o, scale, bias, N, c.norm_eps)
    tl.store(out.y + here, (o * gate * sigmoid(gate)).to(out.y.dtype.element_ty))
    store_shifts(state, att_shift, ffn_shift, x.layer, here, B, C)


@dataclasses.dataclass(frozen=True)
class MixDeltaConfig:
    """Batch elements, channels, the rank of the mixes, channels of z, and the tile: channels, padded rank."""

    B: int
    C: int
    R: int
    width: int
    BC: int
    BR: int


class MixDeltaInputs(NamedTuple):
    """Inputs of `mix_delta_kernel`.

    Attributes:
        x: [B, C], the normalised token.
        last: [layers, B, C], the previous ones.
        z: [B, width], first low-rank stage of the five mixes.
        w: [5, R, C], the second one.
        mixes: [5, C].
        layer: ``2 layer + 3``.
    """

    x: jax.Array
    last: jax.Array
    z: jax.Array
    w: jax.Array
    mixes: jax.Array
    layer: int


class MixDeltaOut(NamedTuple):
    """Planes [5, B, C]."""

    planes: jax.Array


@triton.jit
def mix_delta_kernel(x, out, c: tl.constexpr):
    """The inputs of RWKV-6's products."""
    plane, b = tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) * c.BC + tl.arange(0, c.BC)
    r = tl.arange(0, c.BR)
    inside = (r < c.R)[:, None] & (channel < c.C)[None, :]
    w = tl.load(x.w + plane * (c.R * c.C) + r[:, None] * c.C + channel[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    z = tl.load(x.z + b * c.width + plane * c.R + r, mask=r < c.R, other=0.0)
    mix = load(x.mixes + plane * c.C, channel, channel < c.C, False) + tl.sum(w * z[:, None], 0)
    token = load(x.x + b * c.C, channel, channel < c.C, False)
    last = load(x.last + (((x.layer - 3) // 2) * c.B + b) * c.C, channel, channel < c.C, False)
    mixed = (token + (last - token) * mix).to(out.planes.dtype.element_ty)
    tl.store(out.planes + (plane * c.B + b) * c.C + channel, mixed, mask=channel < c.C)
