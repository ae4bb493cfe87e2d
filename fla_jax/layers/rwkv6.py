"""RWKV-6 ("Finch", x060): attention and feed-forward."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.mesh import shard_like
from ..core.names import name_dense
from ..ops import chunk_rwkv6, fused_recurrent_rwkv6
from ..ops.layer import norm_shift_mix, rwkv6_decay, rwkv6_readout, squared_relu
from .base import Attention, FeedForward
from .init import ByDepth, computed, orthogonal, symmetric_uniform
from .norm import Affine
from .sharding import enter_tp, sequence_axis
from .state import RWKVState

_zeros = nn.initializers.zeros


class RWKV6Attention(Attention):
    """RWKV-6's token mixing (time mix): data-dependent decay and token shift, with a bonus for the current
    token.

    Parameters are named as in official checkpoints: time_maa_{x,w,k,v,r,g} [C], time_maa_w1 [C, 5 R],
    time_maa_w2 [5, R, C] (order w, k, v, r, g), time_decay [C], time_decay_w1 [C, D], time_decay_w2 [D, C],
    time_faaaa [H, N], {receptance,key,value,gate,output}/kernel [C, C] (transposed against PyTorch),
    ln_x/{scale,bias} [C].

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        head_dim, chunk_size, implementation: see `Attention`.
        proj_low_rank_dim: R, rank of the token shift's low-rank part; None for the official 32 (64 from C =
            4096 on).
        decay_low_rank_dim: D, rank of the decay's low-rank part; None for the official 64 (128 from C = 4096
            on).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV6Attention
        >>> layer = RWKV6Attention(hidden_size=64, layer_index=0, num_layers=2, head_dim=16)
        >>> x = jax.random.normal(jax.random.key(0), (1, 8, 64))
        >>> variables = layer.init(jax.random.key(1), x)
        >>> y, state = layer.apply(variables, x)
        >>> y.shape, state.wkv.shape
        ((1, 8, 64), (1, 4, 16, 16))
    """

    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        state: RWKVState | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        norm: Affine | None = None,
    ) -> tuple[jax.Array, RWKVState]:
        """Mixes tokens.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1. One token runs the recurrent op, more run the
                chunked one.
            state: of this layer; None for zeros. ``ffn_shift`` is passed through untouched.
            segment_ids: [B, T] integers: state and token shift restart wherever the id changes; ``state``
                belongs to each row's first segment.
            lengths: [B] integers from 0 to T: the tokens of each row. What stands behind them is not read:
                the new state is the one after ``lengths`` tokens, and the output there means nothing.
            norm: scale and bias [C] of the layer norm before this layer; x is then the residual stream,
                which must be finite behind ``lengths`` as well.

        Returns:
            ``(y, state)``: y [B, T, C] in the compute dtype, and the state after the last token.

        Raises:
            ValueError, TypeError: an argument or a field does not fit; the message names it.

        Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024;
        RWKV-LM ``RWKV-v5/src/model.py``.
        """
        x, state = self.prepare(x, state, segment_ids, lengths, norm)
        T, C = x.shape[1:]
        depth, dtype = self.depth, x.dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        official = 1 if C < 4096 else 2
        R = 32 * official if self.proj_low_rank_dim is None else self.proj_low_rank_dim
        D = 64 * official if self.decay_low_rank_dim is None else self.decay_low_rank_dim

        def vector(name: str, value: Any, axis: str | None) -> jax.Array:
            return self.vector(name, computed(value), (axis,), x)

        def falling() -> jax.Array:
            return depth.mix(depth.falling)

        def half() -> jax.Array:
            return depth.mix(0.5 * depth.falling)

        def lower() -> jax.Array:
            return falling() - 0.3 * depth.rising

        maa = {"x": falling, "w": falling, "k": falling, "v": lower, "r": half, "g": half}
        mu = {name: vector(f"time_maa_{name}", value, None) for name, value in maa.items()}
        w1 = self.weight("time_maa_w1", _zeros, (C, 5 * R), ("embed", "rank")).astype(dtype)
        w2 = self.vector("time_maa_w2", symmetric_uniform(0.01), (None, "rank", "embed"), x, (5, R, C))
        first = self.shift_and_mix(
            x, [mu["x"]], state.att_shift, segment_ids, lengths, norm, normalised=norm is not None
        )
        z = self.product(first.mixed[0], w1, ("embed", "rank"))
        tp_size = self.tp_size(x)
        z = enter_tp(jnp.tanh(name_dense(z)), tp_size).reshape(-1, T, 5, R)
        moves = jnp.einsum("btnr,nrc->nbtc", z, w2.astype(dtype))
        mixed = norm_shift_mix(
            enter_tp(x if norm is None else first.normalised, tp_size),
            [mu[name] for name in "wkvrg"],
            enter_tp(shard_like(state.att_shift, x, 0, 2), tp_size),
            moves=moves,
            segment_ids=None if segment_ids is None else enter_tp(segment_ids, tp_size),
            sequence_axis=sequence_axis(x),
        )
        xw, xk, xv, xr, xg = mixed.mixed

        r = self.dense("receptance", C, orthogonal(1.0), ("embed", "heads"), xr, tp_size)
        k = self.dense("key", C, orthogonal(0.1), ("embed", "heads"), xk, tp_size)
        v = self.dense("value", C, orthogonal(1.0), ("embed", "heads"), xv, tp_size)
        gate = self.dense("gate", C, orthogonal(0.1), ("embed", "heads"), xg, tp_size)
        d1 = self.weight("time_decay_w1", _zeros, (C, D), ("embed", "rank")).astype(dtype)
        d2 = self.weight("time_decay_w2", symmetric_uniform(0.01), (D, C), ("rank", "heads")).astype(dtype)
        w = jnp.tanh(name_dense(self.product(xw, d1, ("embed", "rank"), tp_size=tp_size)))
        w = self.product(w, d2, ("rank", "heads"), tp_size=tp_size, preferred_element_type=wide)
        # made in float32; the op takes it with the range of bfloat16, which float16 has not
        w = rwkv6_decay(
            w, vector("time_decay", depth.decay6, "heads"), dtype if dtype == jnp.bfloat16 else None
        )

        def bonus() -> jax.Array:
            return self.by_head(depth.bonus6())

        u = self.vector(
            "time_faaaa", computed(bonus), ("heads", "kv"), x, (C // self.head_dim, self.head_dim)
        )
        arrays = (self.heads(r), self.heads(k), self.heads(v), self.heads(w), u)
        o, wkv = self.run(chunk_rwkv6, fused_recurrent_rwkv6, arrays, state, segment_ids, lengths)
        scale, bias = self.group_norm(x)
        y = rwkv6_readout(o, self.heads(gate), scale=scale, bias=bias, sequence_axis=sequence_axis(x))
        y = self.dense("output", C, _zeros, ("heads", "embed"), y.reshape(x.shape))
        return y, state.replace(att_shift=first.last, wkv=wkv)


class RWKV6FeedForward(FeedForward):
    """RWKV-6's channel mix: ``sigmoid(W_r x_r) * W_v relu(W_k x_k)^2`` with
    ``x_n = x + (shift(x) - x) maa_n``.

    Parameters: time_maa_{k,r} [C], key/kernel [C, I], value/kernel [I, C], receptance/kernel [C, C].

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        intermediate_size: I, width of the hidden layer; None for the official ``floor(3.5 C / 32) * 32`` (at
            least 32).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV6FeedForward
        >>> layer = RWKV6FeedForward(hidden_size=64, layer_index=0, num_layers=2)
        >>> x = jax.random.normal(jax.random.key(0), (1, 8, 64))
        >>> y, shift = layer.apply(layer.init(jax.random.key(1), x), x)
        >>> y.shape, bool((shift == x[:, -1]).all())
        ((1, 8, 64), True)
    """

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        shift: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        norm: Affine | None = None,
        y: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Mixes channels.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1.
            shift: [B, C], the second result of the call before; None for zeros.
            segment_ids: [B, T] integers: the token shift restarts wherever the id changes.
            lengths: [B] integers from 0 to T: the tokens of each row, as the attention takes them;
                with ``norm``, x and y must be finite behind them.
            norm: scale and bias [C] of the layer norm before this layer. x is then the residual stream, and
                so is the first result: ``x + y`` with what this layer adds to it.
            y: [B, T, C], what the attention adds to the residual stream; only with ``norm``.

        Returns:
            ``(y, shift)``: y [B, T, C] in the compute dtype, and the layer's input at the last token [B, C].

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        x, shift = self.prepare(x, shift, segment_ids, lengths, norm)
        C = self.hidden_size
        depth = ByDepth(self.layer_index, self.num_layers, C, 1)
        maa = computed(lambda: depth.mix(depth.falling**3))
        mixes = [self.vector(f"time_maa_{name}", maa, (None,), x) for name in "kr"]
        mixed = self.shift_and_mix(x, mixes, shift, segment_ids, lengths, norm, y)
        xk, xr = mixed.mixed
        width = max(32, int(3.5 * C) // 32 * 32) if self.intermediate_size is None else self.intermediate_size
        h = self.dense("key", width, orthogonal(1.0), ("embed", "mlp"), xk)
        value = self.dense("value", C, _zeros, ("mlp", "embed"), squared_relu(h))
        gate = jax.nn.sigmoid(self.dense("receptance", C, _zeros, ("embed", None), xr))
        out = gate * value
        return out if norm is None else mixed.x + out, mixed.last
