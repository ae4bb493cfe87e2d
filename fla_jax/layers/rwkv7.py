"""RWKV-7 ("Goose", x070): attention and feed-forward."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.names import name_dense
from ..ops import chunk_rwkv7, fused_recurrent_rwkv7
from ..ops.layer import rwkv7_keys, rwkv7_readout, squared_relu
from .base import Attention, FeedForward, before_end
from .init import ByDepth, computed, low_rank_dim, low_rank_out, orthogonal
from .norm import Affine
from .sharding import sequence_axis
from .state import RWKVState

LOWER_BOUND = -0.61  # the op's promise: -exp(-1/2) = -0.60653 with room for rounding
_zeros = nn.initializers.zeros


class RWKV7Attention(Attention):
    """RWKV-7's token mixing (time mix): generalised delta rule with vector-valued decay and in-context
    learning rate.

    Parameters are named as in official checkpoints: x_{r,w,k,v,a,g} [C], w0, a0, v0, k_k, k_a [C], {w,a,v,g}1
    [C, R], {w,a,v,g}2 [R, C], r_k [H, N], {receptance,key,value,output}/kernel [C, C] (transposed against
    PyTorch), ln_x/{scale,bias} [C]. Layer 0 has no v0, v1, v2; where ``layer_index`` is traced they exist for
    every layer, zero and without effect at layer 0.

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        head_dim, chunk_size, implementation: see `Attention`.
        decay_low_rank_dim: rank of the decay's low-rank pair (w1, w2); None for the official
            ``max(32, round(2.5 sqrt(C) / 32) * 32)``.
        a_low_rank_dim: rank of the in-context rate's pair (a1, a2); None for the official one, factor 2.5.
        v_low_rank_dim: rank of the value residual's pair (v1, v2); None for the official one, factor 1.7.
        gate_low_rank_dim: rank of the gate's pair (g1, g2); None for the official one, factor 5.
        rate_scale: factor on the in-context rate in the state transition,
            ``diag(w) - kk (rate_scale a kk)^T`` with a in (0, 1). 1 is official. 2 lets an eigenvalue be
            negative, down to -1, which state tracking (parity, permutations) needs; checkpoints do not carry
            over between values. The replacement key ``k (1 + (a - 1) k_a)`` keeps a in (0, 1): the option
            changes how the state forgets and not how strongly new values are written. 0 leaves the diagonal
            decay alone as the transition, RWKV-6's class: for comparisons.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV7Attention
        >>> layer = RWKV7Attention(hidden_size=64, layer_index=0, num_layers=2, head_dim=16)
        >>> x = jax.random.normal(jax.random.key(0), (1, 8, 64))
        >>> variables = layer.init(jax.random.key(1), x)
        >>> y, state, v_first = layer.apply(variables, x)  # v_first goes to the layers above
        >>> y.shape, state.wkv.shape
        ((1, 8, 64), (1, 4, 16, 16))
    """

    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    rate_scale: float = 1.0

    def low_rank(
        self,
        name: str,
        x: jax.Array,
        rank: int | None,
        factor: float,
        activation: Any = None,
        keep: Any = None,
        tp_size: int = 1,
    ) -> jax.Array:
        """``activation(x @ name1) @ name2``; ``copies`` as in `placement.dot`."""
        C = self.hidden_size
        rank = low_rank_dim(C, factor) if rank is None else rank

        def second(*args: Any) -> jax.Array:
            return low_rank_out(*args) * (1 if keep is None else jnp.asarray(keep, args[-1]))

        down = self.weight(f"{name}1", _zeros, (C, rank), ("embed", "rank")).astype(x.dtype)
        up = self.weight(f"{name}2", second, (rank, C), ("rank", "heads")).astype(x.dtype)
        h = name_dense(self.product(x, down, ("embed", "rank"), tp_size=tp_size))
        return self.product(
            h if activation is None else activation(h), up, ("rank", "heads"), tp_size=tp_size
        )

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        state: RWKVState | None = None,
        v_first: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        norm: Affine | None = None,
    ) -> tuple[jax.Array, RWKVState, jax.Array]:
        """Mixes tokens.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1. One token runs the recurrent op, more run the
                chunked one.
            state: of this layer; None for zeros. ``ffn_shift`` is passed through untouched.
            v_first: [B, T, C], the third result of layer 0 for the same tokens; required where
                ``layer_index > 0`` and ignored at layer 0.
            segment_ids: [B, T] integers: state and token shift restart wherever the id changes; ``state``
                belongs to each row's first segment.
            lengths: [B] integers from 0 to T: the tokens of each row. What stands behind them is not read:
                the new state is the one after ``lengths`` tokens, and the output there means nothing.
            norm: scale and bias [C] of the layer norm before this layer; x is then the residual stream,
                which must be finite behind ``lengths`` as well.

        Returns:
            ``(y, state, v_first)``: y [B, T, C] in the compute dtype, the state after the last token, and
            v_first for the layers above.

        Raises:
            ValueError, TypeError: an argument or a field does not fit; the message names it.

        Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025; RWKV-LM
        ``RWKV-v7/train_temp/src/model.py``.
        """
        x, state = self.prepare(x, state, segment_ids, lengths, norm)
        C, layer, depth, dtype = self.hidden_size, self.layer_index, self.depth, x.dtype
        first = isinstance(layer, int) and layer == 0
        if first:
            v_first = None
        elif v_first is None:
            raise ValueError(
                "v_first must be given at layers above 0 (layer_index > 0): it is the third result of layer 0"
            )
        elif v_first.shape != x.shape:
            raise ValueError(
                f"v_first must have shape [B, T, C] = {list(x.shape)}, got {list(v_first.shape)}"
            )
        elif norm is None:
            v_first = before_end(v_first, lengths)
        keep = True if isinstance(layer, int) else layer > 0  # whether there is a value residual

        def vector(name: str, value: Any, axis: str | None) -> jax.Array:
            return self.vector(name, computed(value), (axis,), x)

        def mix(name: str, exponent: float) -> jax.Array:
            return vector(f"x_{name}", lambda: depth.mix(exponent * depth.falling), None)

        mixes = [mix("r", 0.2), mix("w", 0.9), mix("k", 0.7), mix("v", 0.7), mix("a", 0.9), mix("g", 0.2)]
        tp_size = self.tp_size(x)
        mixed = self.shift_and_mix(x, mixes, state.att_shift, segment_ids, lengths, norm, tp_size=tp_size)
        xr, xw, xk, xv, xa, xg = mixed.mixed

        r = self.heads(self.dense("receptance", C, orthogonal(1.0), ("embed", "heads"), xr, tp_size))
        k = self.heads(self.dense("key", C, orthogonal(0.1), ("embed", "heads"), xk, tp_size))
        v = self.heads(self.dense("value", C, orthogonal(1.0), ("embed", "heads"), xv, tp_size))
        decay = self.heads(self.low_rank("w", xw, self.decay_low_rank_dim, 2.5, jnp.tanh, tp_size=tp_size))
        rate = self.heads(self.low_rank("a", xa, self.a_low_rank_dim, 2.5, tp_size=tp_size))
        gate = self.heads(
            self.low_rank("g", xg, self.gate_low_rank_dim, 5.0, jax.nn.sigmoid, tp_size=tp_size)
        )
        residual_mix = v0 = None
        if v_first is not None:
            # XLA would merge this product with that of ``value``, which has the same operand, and then copy
            # the parts of the result apart, and those of its gradient together: 0.35 GB at B T C = 2^25
            apart = jax.lax.optimization_barrier(xv)
            residual_mix = self.heads(
                self.low_rank("v", apart, self.v_low_rank_dim, 1.7, keep=keep, tp_size=tp_size)
            )
            v0 = self.by_head(vector("v0", lambda: depth.value7() * keep, "heads"))
            v_first = self.heads(v_first)
        keys = rwkv7_keys(
            decay,
            rate,
            k,
            v,
            w0=self.by_head(vector("w0", depth.decay7, "heads")),
            a0=self.by_head(vector("a0", depth.rate7, "heads")),
            k_k=self.by_head(vector("k_k", depth.key7, "heads")),
            k_a=self.by_head(vector("k_a", lambda: 1.02, "heads")),
            mix=residual_mix,
            v_first=v_first,
            v0=v0,
            residual=keep,
            rate_scale=self.rate_scale,
            # made in float32; the op takes it with the range of bfloat16, which float16 has not
            decay_dtype=dtype if dtype == jnp.bfloat16 else None,
            sequence_axis=sequence_axis(x),
        )
        arrays = (r, keys.w, keys.k, keys.v, keys.a, keys.b)
        o, wkv = self.run(
            chunk_rwkv7, fused_recurrent_rwkv7, arrays, state, segment_ids, lengths, lower_bound=LOWER_BOUND
        )
        scale, bias = self.group_norm(x)
        r_k = self.vector(
            "r_k", computed(lambda: -0.04), ("heads", "kv"), x, (C // self.head_dim, self.head_dim)
        )
        y = rwkv7_readout(
            o,
            r,
            keys.k_bonus,
            keys.v_bonus,
            gate,
            scale=scale,
            bias=bias,
            r_k=r_k,
            sequence_axis=sequence_axis(x),
        )
        y = self.dense("output", C, _zeros, ("heads", "embed"), y.reshape(x.shape))
        return y, state.replace(att_shift=mixed.last, wkv=wkv), keys.v_first.reshape(x.shape)


class RWKV7FeedForward(FeedForward):
    """RWKV-7's channel mix: ``W_v relu(W_k (x + (shift(x) - x) x_k))^2``.

    Parameters: x_k [C], key/kernel [C, I], value/kernel [I, C].

    Attributes:
        hidden_size, layer_index, num_layers, dtype, param_dtype, logical_axes: see `Layer`.
        intermediate_size: I, width of the hidden layer; None for the official 4 C.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV7FeedForward
        >>> layer = RWKV7FeedForward(hidden_size=64, layer_index=0, num_layers=2)
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
        x_k = self.vector("x_k", computed(lambda: depth.mix(depth.falling**4)), (None,), x)
        mixed = self.shift_and_mix(x, [x_k], shift, segment_ids, lengths, norm, y)
        width = 4 * C if self.intermediate_size is None else self.intermediate_size
        h = self.dense("key", width, orthogonal(1.0), ("embed", "mlp"), mixed.mixed[0])
        out = self.dense("value", C, _zeros, ("mlp", "embed"), squared_relu(h))
        if norm is None:
            return out, mixed.last
        in_a_loop = isinstance(self.layer_index, jax.core.Tracer)
        return _added_apart(mixed.x, out) if in_a_loop else mixed.x + out, mixed.last


@jax.custom_vjp
def _added_apart(x: jax.Array, out: jax.Array) -> jax.Array:
    """``x + out``; where nothing is differentiated in an operation of its own.

    XLA would let the product that makes ``out`` add it to x, which is where x is; a loop over layers then
    copies x twice in every layer, to hand it on from there. That takes longer than this sum.
    """
    return x + jax.lax.optimization_barrier(out)


_added_apart.defvjp(lambda x, out: (x + out, None), lambda _, g: (g, g))
