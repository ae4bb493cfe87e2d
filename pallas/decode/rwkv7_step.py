"""RWKV-7's decoded token, one head and batch element a program: second low-rank stages, keys, step, readout::

    g = decay_scale sigmoid(w0 + W w),   rate = sigmoid(a0 + A a),   v = v + (v_first - v) sigmoid(v0 + V m)
    kk = k k_k / |k k_k|,   k = k (1 + (rate - 1) k_a)
    h = diag(exp(g)) h - (kk rate rate_scale) (kk^T h) + k v^T,   o = r^T h
    y = (group_norm(o) + sum(r k r_k) v) gate

Grid: heads, batch elements.
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from ..common.sums import sums
from .gemv import sigmoid
from .head_step import StepConfig, group_norm, load_low_rank, load_vector, low_rank_sum, store_shifts


@dataclasses.dataclass(frozen=True)
class RWKV7StepConfig(StepConfig):
    """`StepConfig` with the ranks of the four stages (multiples of BR), the channels of layer 0's projections
    and the constants.
    """

    decay_rank: int
    rate_rank: int
    mix_rank: int
    gate_rank: int
    first_width: int
    decay_scale: float
    rate_scale: float
    key_eps: float


class RWKV7Params(NamedTuple):
    """Parameters of a layer: [C] each, and the second stages [4, C, R], None if their results are given."""

    second: jax.Array | None
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
    if x.second is None:
        w, low, n = p.second + head * (N * c.R), token + 3 * C, tl.arange(0, N)
        decay_w, decay_h = load_low_rank(w, low, n, c.R, c.decay_rank, c.BR)
        rate_w, rate_h = load_low_rank(w + C * c.R, low + c.decay_rank, n, c.R, c.rate_rank, c.BR)
        low += c.decay_rank + c.rate_rank
        if x.first_projections is not None:
            mix_w, mix_h = load_low_rank(w + 2 * C * c.R, low, n, c.R, c.mix_rank, c.BR)
        gate_w, gate_h = load_low_rank(w + 3 * C * c.R, low + c.mix_rank, n, c.R, c.gate_rank, c.BR)
        decay, rate, gate = (
            low_rank_sum(decay_w, decay_h),
            low_rank_sum(rate_w, rate_h),
            low_rank_sum(gate_w, gate_h),
        )
        if x.first_projections is not None:
            mix = low_rank_sum(mix_w, mix_h)
    else:
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
