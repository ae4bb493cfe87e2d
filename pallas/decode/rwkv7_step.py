"""RWKV-7's decoded token: the second low-rank stages, and keys, step and readout of a head::

    g = decay_scale sigmoid(w0 + W w),   rate = sigmoid(a0 + A a),   v = v + (v_first - v) sigmoid(v0 + V m)
    kk = k k_k / |k k_k|,   k = k (1 + (rate - 1) k_a)
    h = diag(exp(g)) h - (kk rate rate_scale) (kk^T h) + k v^T,   o = r^T h
    y = (group_norm(o) + sum(r k r_k) v) gate

The stages have a kernel of their own: a GPU has more multiprocessors than a token has heads, and the program
of a head would wait for 70 KB of weights. Grids: (blocks of channels, 4 stages, B), and (heads, B).
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from ..common.sums import sums
from .gemv import sigmoid
from .head_step import StepConfig, group_norm, load_vector, store_shifts


@dataclasses.dataclass(frozen=True)
class LowRankConfig:
    """Compile-time facts of `low_rank_kernel`.

    Attributes:
        C: channels.
        BN: channels of a program.
        width: channels of the projections of a token.
        R: rank of the stored weights.
        BR: R padded to a power of two.
        ranks: rank of each stage.
    """

    C: int
    BN: int
    width: int
    R: int
    BR: int
    ranks: tuple[int, ...]


class LowRankInputs(NamedTuple):
    """Projections [B, width] and the second stages [4, C, R]."""

    projections: jax.Array
    second: jax.Array


class LowRankOut(NamedTuple):
    """y [4, B, C] float32."""

    y: jax.Array


@triton.jit
def low_rank_kernel(x, out, c: tl.constexpr):
    """The products of the second low-rank stages."""
    stage, b = tl.program_id(1), tl.program_id(2)
    rank, start = c.ranks[0], 3 * c.C  # the stages' inputs follow r, k and v
    for i in tl.static_range(1, len(c.ranks)):
        rank = tl.where(stage == i, c.ranks[i], rank)
        start += tl.where(stage >= i, c.ranks[i - 1], 0)
    n, r = tl.program_id(0) * c.BN + tl.arange(0, c.BN), tl.arange(0, c.BR)
    inside = (n < c.C)[:, None] & (r < rank)[None, :]
    w = tl.load(x.second + (stage * c.C + n)[:, None] * c.R + r[None, :], mask=inside, other=0.0)
    h = tl.load(x.projections + b * c.width + start + r, mask=r < rank, other=0.0)
    y = tl.sum(w.to(tl.float32) * h[None, :], 1)
    tl.store(out.y + (stage * tl.num_programs(2) + b) * c.C + n, y, mask=n < c.C)


@dataclasses.dataclass(frozen=True)
class RWKV7StepConfig(StepConfig):
    """`StepConfig` with the channels of layer 0's projections and the constants."""

    first_width: int
    decay_scale: float
    rate_scale: float
    key_eps: float


class RWKV7Params(NamedTuple):
    """Parameters of a layer, [C] each."""

    w0: jax.Array
    a0: jax.Array
    v0: jax.Array | None
    k_k: jax.Array
    k_a: jax.Array
    r_k: jax.Array
    scale: jax.Array
    bias: jax.Array


@triton.jit
def rwkv7_kernel(x, p, state, out, c: tl.constexpr):
    """``x.projections``: r, k, v, then the ranks of decay, rate, value mix and gate. ``out.state`` has the
    memory of ``state``.
    """
    B: tl.constexpr = c.B
    N: tl.constexpr = c.N
    C: tl.constexpr = c.H * N
    head = tl.program_id(0)
    channel = head * N + tl.arange(0, N)
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    # all loads are issued before the first sum over channels, a barrier that they do not move across
    w0, a0, k_k = load_vector(p.w0, channel), load_vector(p.a0, channel), load_vector(p.k_k, channel)
    k_a, r_k, scale = load_vector(p.k_a, channel), load_vector(p.r_k, channel), load_vector(p.scale, channel)
    bias = load_vector(p.bias, channel)
    if x.first_projections is not None:
        v0 = load_vector(p.v0, channel)
    b = tl.program_id(1)
    tile_start = ((((x.layer - 3) // 2) * B + b) * c.H + head).to(tl.int64) * (N * N)
    h = tl.load(state.wkv + tile_start + tile).to(tl.float32)
    token = x.projections + b * c.width
    r, k, v = (
        load_vector(token, channel),
        load_vector(token + C, channel),
        load_vector(token + 2 * C, channel),
    )
    if x.first_projections is not None:
        first = load_vector(x.first_projections + b * c.first_width + 2 * C, channel)
    active = tl.load(x.active + b) != 0
    here = b * C + channel
    att_shift, ffn_shift = tl.load(x.att_shift + here), tl.load(x.ffn_shift + here)
    decay, rate = load_vector(x.second + b * C, channel), load_vector(x.second + (B + b) * C, channel)
    gate = load_vector(x.second + (3 * B + b) * C, channel)
    if x.first_projections is not None:
        mix = load_vector(x.second + (2 * B + b) * C, channel)
    decay = tl.exp(c.decay_scale * sigmoid(w0 + decay))
    rate = sigmoid(a0 + rate)
    if x.first_projections is not None:
        v += (first - v) * sigmoid(v0 + mix)
    kk = k * k_k
    k *= 1.0 + (rate - 1.0) * k_a

    # o from the old state and the token's own update: it does not wait for the new state
    square, by_key, by_kk, bonus = sums((kk * kk, r * k, r * kk * rate, r * k * r_k))
    unit = tl.where(square > c.key_eps * c.key_eps, tl.rsqrt(square), 1.0 / c.key_eps)
    kk *= unit
    read, o = sums((h * kk[:, None], h * (decay * r)[:, None]))
    write = kk * rate * c.rate_scale
    h = h * decay[:, None] + (k[:, None] * v[None, :] - write[:, None] * read[None, :])
    tl.store(state.wkv + tile_start + tile, h.to(state.wkv.dtype.element_ty), mask=active)
    o += by_key * v - (by_kk * unit * c.rate_scale) * read
    o = group_norm(o, scale, bias, N, c.norm_eps) + bonus * v
    tl.store(out.y + here, (o * gate).to(out.y.dtype.element_ty))
    store_shifts(state, att_shift, ffn_shift, x.layer, here, B, C)
