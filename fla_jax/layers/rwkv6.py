"""RWKV-6 ("Finch", x060): attention and feed-forward."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.names import name_dense
from ..ops import chunk_rwkv6, fused_recurrent_rwkv6
from .base import Attention, FeedForward
from .init import ByDepth, computed, orthogonal, symmetric_uniform
from .shift import token_shift
from .state import RWKVState

_zeros = nn.initializers.zeros


class RWKV6Attention(Attention):
    """RWKV-6's token mixing (time mix): data-dependent decay and token shift, with a bonus for the current token.

    Parameters are named as in official checkpoints: time_maa_{x,w,k,v,r,g} [C], time_maa_w1 [C, 5 R], time_maa_w2 [5, R, C] (order w, k, v, r, g),
    time_decay [C], time_decay_w1 [C, D], time_decay_w2 [D, C], time_faaaa [H, N], {receptance,key,value,gate,output}/kernel [C, C] (transposed against
    PyTorch), ln_x/{scale,bias} [C].

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        head_dim, chunk_size, implementation: see `Attention`.
        proj_low_rank_dim: R, rank of the token shift's low-rank part; None for the official 32 (64 from C = 4096 on).
        decay_low_rank_dim: D, rank of the decay's low-rank part; None for the official 64 (128 from C = 4096 on).
    """

    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, state: RWKVState | None = None, segment_ids: jax.Array | None = None) -> tuple[jax.Array, RWKVState]:
        """Mixes tokens.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1. One token runs the recurrent op, more run the chunked one.
            state: of this layer; None for zeros. ``ffn_shift`` is passed through untouched.
            segment_ids: [B, T] integers: state and token shift restart wherever the id changes; ``state`` belongs to each row's first segment.

        Returns:
            ``(y, state)``: y [B, T, C] in the compute dtype, and the state after the last token.

        Raises:
            ValueError, TypeError: an argument or a field does not fit; the message names it.

        Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024; RWKV-LM ``RWKV-v5/src/model.py``.
        """
        x, state = self.prepare(x, state, segment_ids)
        B, T, C = x.shape
        depth, dtype = self.depth, x.dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        official = 1 if C < 4096 else 2
        R = 32 * official if self.proj_low_rank_dim is None else self.proj_low_rank_dim
        D = 64 * official if self.decay_low_rank_dim is None else self.decay_low_rank_dim
        vector = lambda name, value, axis: self.vector(name, computed(value), (axis,), x)

        falling = lambda: depth.mix(depth.falling)
        half = lambda: depth.mix(0.5 * depth.falling)
        maa = {"x": falling, "w": falling, "k": falling, "v": lambda: falling() - 0.3 * depth.rising, "r": half, "g": half}
        mu = {name: vector(f"time_maa_{name}", value, None).astype(dtype) for name, value in maa.items()}
        w1 = self.weight("time_maa_w1", _zeros, (C, 5 * R), ("embed", "rank")).astype(dtype)
        w2 = self.vector("time_maa_w2", symmetric_uniform(0.01), (None, "rank", "embed"), x, (5, R, C)).astype(dtype)
        d = token_shift(x, state.att_shift, segment_ids) - x
        z = self.product(x + d * mu["x"], w1, ("embed", "rank"))
        z = jnp.tanh(name_dense(z)).reshape(B, T, 5, R)
        m = jnp.einsum("btnr,nrc->nbtc", z, w2)
        xw, xk, xv, xr, xg = (x + d * (mu[name] + m[n]) for n, name in enumerate("wkvrg"))

        r = self.dense("receptance", C, orthogonal(1.0), ("embed", "heads"), xr)
        k = self.dense("key", C, orthogonal(0.1), ("embed", "heads"), xk)
        v = self.dense("value", C, orthogonal(1.0), ("embed", "heads"), xv)
        g = jax.nn.silu(self.dense("gate", C, orthogonal(0.1), ("embed", "heads"), xg))
        d1 = self.weight("time_decay_w1", _zeros, (C, D), ("embed", "rank")).astype(dtype)
        d2 = self.weight("time_decay_w2", symmetric_uniform(0.01), (D, C), ("rank", "heads")).astype(dtype)
        w = jnp.tanh(name_dense(self.product(xw, d1, ("embed", "rank"))))
        w = self.product(w, d2, ("rank", "heads"), preferred_element_type=wide)
        w = vector("time_decay", depth.decay6, "heads").astype(wide) + w
        # exp(-exp(20)) is 0 already; without the bound exp overflows and its gradient is inf * 0
        w = -jnp.exp(jnp.minimum(w, 20))

        bonus = lambda: depth.bonus6().reshape(-1, self.head_dim)
        u = self.vector("time_faaaa", computed(bonus), ("heads", "kv"), x, (C // self.head_dim, self.head_dim))
        arrays = (self.heads(r), self.heads(k), self.heads(v), self.heads(w), u)
        o, wkv = self.run(chunk_rwkv6, fused_recurrent_rwkv6, arrays, state, segment_ids)
        y = self.dense("output", C, _zeros, ("heads", "embed"), self.group_norm(o, dtype) * g)
        return y, state.replace(att_shift=x[:, -1], wkv=wkv)


class RWKV6FeedForward(FeedForward):
    """RWKV-6's channel mix: ``sigmoid(W_r x_r) * W_v relu(W_k x_k)^2`` with ``x_n = x + (shift(x) - x) maa_n``.

    Parameters: time_maa_{k,r} [C], key/kernel [C, I], value/kernel [I, C], receptance/kernel [C, C].

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        intermediate_size: I, width of the hidden layer; None for the official ``floor(3.5 C / 32) * 32`` (at least 32).
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
        maa = computed(lambda: depth.mix(depth.falling**3))
        mu_k, mu_r = (self.vector(f"time_maa_{name}", maa, (None,), x).astype(x.dtype) for name in "kr")
        d = token_shift(x, shift, segment_ids) - x
        width = max(32, int(3.5 * C) // 32 * 32) if self.intermediate_size is None else self.intermediate_size
        h = self.dense("key", width, orthogonal(1.0), ("embed", "mlp"), x + d * mu_k)
        y = self.dense("value", C, _zeros, ("mlp", "embed"), jnp.square(jax.nn.relu(h)))
        gate = jax.nn.sigmoid(self.dense("receptance", C, _zeros, ("embed", None), x + d * mu_r))
        return gate * y, x[:, -1]
