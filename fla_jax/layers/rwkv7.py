"""RWKV-7 ("Goose", x070): attention and feed-forward."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.names import name_dense
from ..ops import chunk_rwkv7, fused_recurrent_rwkv7
from .base import Attention, FeedForward
from .init import ByDepth, computed, low_rank_dim, low_rank_out, orthogonal
from .shift import token_shift
from .state import RWKVState

LOG_DECAY_SCALE = -math.exp(-0.5)
LOWER_BOUND = -0.61  # the op's promise: -exp(-1/2) = -0.60653 with room for rounding
_zeros = nn.initializers.zeros


def normalise(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    """``x / max(|x|, eps)`` over the last axis.

    Where ``|x| <= eps`` the gradient is zero: the slope there, 1 / eps, is no information and would drown every other gradient.
    """
    square = jnp.sum(x * x, -1, keepdims=True)
    alive = square > eps**2
    scale = jnp.where(alive, jax.lax.rsqrt(jnp.where(alive, square, 1)), 1 / eps)
    return jnp.where(alive, x, jax.lax.stop_gradient(x)) * scale


class RWKV7Attention(Attention):
    """RWKV-7's token mixing (time mix): generalised delta rule with vector-valued decay and in-context learning rate.

    Parameters are named as in official checkpoints: x_{r,w,k,v,a,g} [C], w0, a0, v0, k_k, k_a [C], {w,a,v,g}1 [C, R], {w,a,v,g}2 [R, C], r_k [H, N],
    {receptance,key,value,output}/kernel [C, C] (transposed against PyTorch), ln_x/{scale,bias} [C]. Layer 0 has no v0, v1, v2; where ``layer_index`` is traced
    they exist for every layer, zero and without effect at layer 0.

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        head_dim, chunk_size, implementation: see `Attention`.
        decay_low_rank_dim: rank of the decay's low-rank pair (w1, w2); None for the official ``max(32, round(2.5 sqrt(C) / 32) * 32)``.
        a_low_rank_dim: rank of the in-context rate's pair (a1, a2); None for the official one, factor 2.5.
        v_low_rank_dim: rank of the value residual's pair (v1, v2); None for the official one, factor 1.7.
        gate_low_rank_dim: rank of the gate's pair (g1, g2); None for the official one, factor 5.
        rate_scale: factor on the in-context rate in the state transition, ``diag(w) - kk (rate_scale a kk)^T`` with a in (0, 1). 1 is official. 2 lets an
            eigenvalue be negative, down to -1, which state tracking (parity, permutations) needs; checkpoints do not carry over between values. The
            replacement key ``k (1 + (a - 1) k_a)`` keeps a in (0, 1): the option changes how the state forgets and not how strongly new values are written.
            0 leaves the diagonal decay alone as the transition, RWKV-6's class: for comparisons.
    """

    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    rate_scale: float = 1.0

    def low_rank(self, name: str, x: jax.Array, rank: int | None, factor: float, activation: Any = None, keep: Any = None) -> jax.Array:
        """``activation(x @ name1) @ name2`` in float32 (at least)."""
        C = self.hidden_size
        rank = low_rank_dim(C, factor) if rank is None else rank
        second = low_rank_out if keep is None else lambda *args: low_rank_out(*args) * jnp.asarray(keep, args[-1])
        down = self.weight(f"{name}1", _zeros, (C, rank), ("embed", "rank")).astype(x.dtype)
        up = self.weight(f"{name}2", second, (rank, C), ("rank", "heads")).astype(x.dtype)
        h = name_dense(self.product(x, down, ("embed", "rank")))
        h = h if activation is None else activation(h)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return self.product(h, up, ("rank", "heads"), preferred_element_type=wide)

    @nn.compact
    def __call__(
        self, x: jax.Array, state: RWKVState | None = None, v_first: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, RWKVState, jax.Array]:
        """Mixes tokens.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1. One token runs the recurrent op, more run the chunked one.
            state: of this layer; None for zeros. ``ffn_shift`` is passed through untouched.
            v_first: [B, T, C], the third result of layer 0 for the same tokens; required where ``layer_index > 0`` and ignored at layer 0.
            segment_ids: [B, T] integers: state and token shift restart wherever the id changes; ``state`` belongs to each row's first segment.

        Returns:
            ``(y, state, v_first)``: y [B, T, C] in the compute dtype, the state after the last token, and v_first for the layers above.

        Raises:
            ValueError, TypeError: an argument or a field does not fit; the message names it.

        Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025; RWKV-LM ``RWKV-v7/train_temp/src/model.py``.
        """
        x, state = self.prepare(x, state, segment_ids)
        if self.rate_scale < 0:
            raise ValueError(f"rate_scale must be >= 0, got {self.rate_scale}")
        C, layer, depth, dtype = self.hidden_size, self.layer_index, self.depth, x.dtype
        first = isinstance(layer, int) and layer == 0
        if first:
            v_first = None
        elif v_first is None:
            raise ValueError("v_first must be given at layers above 0 (layer_index > 0): it is the third result of layer 0")
        elif v_first.shape != x.shape:
            raise ValueError(f"v_first must have shape [B, T, C] = {list(x.shape)}, got {list(v_first.shape)}")
        wide = jnp.promote_types(dtype, jnp.float32)  # of everything elementwise that the state's transition is made of
        vector = lambda name, value, axis: self.vector(name, computed(value), (axis,), x)

        d = token_shift(x, state.att_shift, segment_ids) - x
        mixed = lambda name, exponent: x + d * vector(f"x_{name}", lambda: depth.mix(exponent * depth.falling), None).astype(dtype)
        xr, xw, xk, xv, xa, xg = mixed("r", 0.2), mixed("w", 0.9), mixed("k", 0.7), mixed("v", 0.7), mixed("a", 0.9), mixed("g", 0.2)

        r = self.dense("receptance", C, orthogonal(1.0), ("embed", "heads"), xr)
        k = self.dense("key", C, orthogonal(0.1), ("embed", "heads"), xk)
        v = self.dense("value", C, orthogonal(1.0), ("embed", "heads"), xv)
        w = self.low_rank("w", xw, self.decay_low_rank_dim, 2.5, jnp.tanh)
        w = LOG_DECAY_SCALE * jax.nn.sigmoid(vector("w0", depth.decay7, "heads").astype(wide) + w)
        a = self.low_rank("a", xa, self.a_low_rank_dim, 2.5)
        a = jax.nn.sigmoid(vector("a0", depth.rate7, "heads").astype(wide) + a)
        g = self.low_rank("g", xg, self.gate_low_rank_dim, 5.0, jax.nn.sigmoid)

        if v_first is None:
            v_first = v
        else:
            keep = True if isinstance(layer, int) else layer > 0
            mix = self.low_rank("v", xv, self.v_low_rank_dim, 1.7, keep=keep)
            mix = jax.nn.sigmoid(vector("v0", lambda: depth.value7() * keep, "heads").astype(wide) + mix).astype(dtype)
            v_first = jnp.where(keep, v_first.astype(dtype), v)  # at layer 0 the residual is then zero
            v = v + (v_first - v) * mix

        k_wide = k.astype(wide)
        kk = normalise(self.heads(k_wide * vector("k_k", depth.key7, "heads").astype(wide)))
        k = (k_wide * (1 + (a - 1) * vector("k_a", lambda: 1.02, "heads").astype(wide))).astype(dtype)
        # up to a rate of 1 the transition contracts even with kk rounded to bfloat16; at 2 rounding alone could make it expand
        b = (kk * self.heads(a) * self.rate_scale).astype(dtype if self.rate_scale <= 1 else wide)
        kk = kk.astype(b.dtype)

        r, k, v = self.heads(r), self.heads(k), self.heads(v)
        o, wkv = self.run(
            chunk_rwkv7, fused_recurrent_rwkv7, (r, self.heads(w), k, v, -kk, b), state, segment_ids, lower_bound=LOWER_BOUND
        )  # fmt: skip
        o = self.group_norm(o, dtype)
        r_k = self.vector("r_k", computed(lambda: -0.04), ("heads", "kv"), x, (C // self.head_dim, self.head_dim))
        bonus = jnp.sum(r.astype(wide) * k.astype(wide) * r_k.astype(wide), -1, keepdims=True) * v
        y = (o + bonus.reshape(o.shape)) * g
        y = self.dense("output", C, _zeros, ("heads", "embed"), y.astype(dtype))
        return y, state.replace(att_shift=x[:, -1], wkv=wkv), v_first


class RWKV7FeedForward(FeedForward):
    """RWKV-7's channel mix: ``W_v relu(W_k (x + (shift(x) - x) x_k))^2``.

    Parameters: x_k [C], key/kernel [C, I], value/kernel [I, C].

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        intermediate_size: I, width of the hidden layer; None for the official 4 C.
    """

    @nn.compact
    def __call__(self, x: jax.Array, shift: jax.Array | None = None, segment_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Mixes channels.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1.
            shift: [B, C], the second result of the call before; None for zeros.
            segment_ids: [B, T] integers: the token shift restarts wherever the id changes.

        Returns:
            ``(y, shift)``: y [B, T, C] in the compute dtype, and x at the last token [B, C].

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        x, shift = self.prepare(x, shift, segment_ids)
        C = self.hidden_size
        depth = ByDepth(self.layer_index, self.num_layers, C, 1)
        x_k = self.vector("x_k", computed(lambda: depth.mix(depth.falling**4)), (None,), x).astype(x.dtype)
        mixed = x + (token_shift(x, shift, segment_ids) - x) * x_k
        width = 4 * C if self.intermediate_size is None else self.intermediate_size
        h = self.dense("key", width, orthogonal(1.0), ("embed", "mlp"), mixed)
        y = self.dense("value", C, _zeros, ("mlp", "embed"), jnp.square(jax.nn.relu(h)))
        return y, x[:, -1]
