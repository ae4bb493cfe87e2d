"""RWKV-7 ("Goose", x070): attention and feed-forward."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..ops import chunk_rwkv7, fused_recurrent_rwkv7
from ..ops.layer import rwkv7_keys, rwkv7_readout
from .attention import Attention
from .base import zero_beyond
from .feed_forward import FeedForward
from .init import Initializer, Value, computed, low_rank_dim, low_rank_out, orthogonal
from .norm import Affine
from .state import RWKVState

LOWER_BOUND = -0.61  # of the log decays: -exp(-1/2) = -0.60653, with a margin for rounding
_zeros = nn.initializers.zeros


class RWKV7Attention(Attention):
    """RWKV-7's attention: generalised delta rule with vector-valued decay and in-context learning rate.

    Parameters are named as in official checkpoints: x_{r,w,k,v,a,g} [C], w0, a0, v0, k_k, k_a [C], {w,a,v,g}1
    [C, R], {w,a,v,g}2 [R, C], r_k [H, N], {receptance,key,value,output}/kernel [C, C] (transposed against
    PyTorch), ln_x/{scale,bias} [C]. Layer 0 has no v0, v1, v2; where ``layer_index`` is traced they exist for
    every layer, zero and without effect at layer 0.

    Attributes:
        decay_low_rank_dim: rank of the decay's low-rank pair (w1, w2); None for the official
            ``max(32, round(2.5 sqrt(C) / 32) * 32)``.
        a_low_rank_dim: rank of the in-context rate's pair (a1, a2); None for the official one, factor 2.5.
        v_low_rank_dim: rank of the value residual's pair (v1, v2); None for the official one, factor 1.7.
        gate_low_rank_dim: rank of the gate's pair (g1, g2); None for the official one, factor 5.
        rate_scale: factor on the in-context rate a in (0, 1) of the transition
            ``diag(w) - kk (rate_scale a kk)^T``, not on the replacement key. 1 is official. 2 lets an
            eigenvalue be negative, down to -1, which state tracking (parity, permutations) needs; 0 leaves
            the diagonal decay alone. Checkpoints do not carry over between values.

    The other fields: `Layer` and `Attention`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV7Attention
        >>> layer = RWKV7Attention(hidden_size=64, layer_index=0, num_layers=2, head_dim=16)
        >>> x = jax.random.normal(jax.random.key(0), (1, 8, 64))
        >>> (y, state, v_first), _ = layer.init_with_output(jax.random.key(1), x)
        >>> y.shape, state.wkv.shape
        ((1, 8, 64), (1, 4, 16, 16))
    """

    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    rate_scale: float = 1.0

    def rank(self, name: str) -> int:
        """The rank of a low-rank pair."""
        given, factor = {
            "w": (self.decay_low_rank_dim, 2.5),
            "a": (self.a_low_rank_dim, 2.5),
            "v": (self.v_low_rank_dim, 1.7),
            "g": (self.gate_low_rank_dim, 5.0),
        }[name]
        return low_rank_dim(self.hidden_size, factor) if given is None else given

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T C"],
        state: RWKVState | None = None,
        v_first: Float[Array, "B T C"] | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        norm: Affine | None = None,
    ) -> tuple[Float[Array, "B T C"], RWKVState, Float[Array, "B T C"]]:
        """Mixes tokens.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1. One token runs the recurrent op, more run the
                chunked one.
            state: of this layer; None for zeros. ``ffn_shift`` is passed through.
            v_first: [B, T, C], the third result of layer 0 for the same tokens; required where
                ``layer_index > 0`` and ignored at layer 0.
            segment_ids: [B, T] integers: state and token shift restart wherever the id changes; ``state``
                is that before each example's first segment.
            lengths: [B] integers from 0 to T: number of tokens of each example. Positions at or beyond
                ``lengths`` are ignored, their outputs undefined; the new state is that after ``lengths``
                tokens.
            norm: scale and bias [C] of the layer norm before this layer; x is then the residual stream,
                which must be finite at and beyond ``lengths`` too.

        Returns:
            ``(y, state, v_first)``: y [B, T, C] in the compute dtype, the state after the last token, and
            v_first for the layers above.

        Raises:
            ValueError, TypeError: an argument or a field does not fit; the message names it.

        Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025; RWKV-LM
        ``RWKV-v7/train_temp/src/model.py``.
        """
        call = self.prepare(x, state, segment_ids, lengths, norm)
        tp = call.enter_tp()
        x, C, depth, dtype = call.x, self.hidden_size, self.depth, call.x.dtype
        v_first, has_residual = self.value_residual(x, v_first, lengths, norm)

        # token shift
        mu = [
            call.vector(f"x_{name}", computed(functools.partial(depth.mix7, name)), None) for name in "rwkvag"
        ]
        mixed = tp.shift_mix(mu)
        xr, xw, xk, xv, xa, xg = mixed.mixed

        r = tp.heads(tp.dense("receptance", C, orthogonal(1.0), ("embed", "heads"), xr))
        k = tp.heads(tp.dense("key", C, orthogonal(0.1), ("embed", "heads"), xk))
        v = tp.heads(tp.dense("value", C, orthogonal(1.0), ("embed", "heads"), xv))
        w = tp.heads(tp.low_rank("w", self.rank("w"), low_rank_out, xw, jnp.tanh))
        a = tp.heads(tp.low_rank("a", self.rank("a"), low_rank_out, xa))
        g = tp.heads(tp.low_rank("g", self.rank("g"), low_rank_out, xg, jax.nn.sigmoid))
        residual: dict[str, jax.Array] = {}
        if v_first is not None:
            # XLA would merge this product with that of "value", and then copy the result and its gradient
            # apart: 0.35 GB at B T C = 2^25
            xv = jax.lax.optimization_barrier(xv)
            mix = tp.heads(tp.low_rank("v", self.rank("v"), _only_if(has_residual, low_rank_out), xv))
            v0 = call.vector("v0", _only_if(has_residual, computed(depth.value7)), "heads")
            residual = {"mix": mix, "v_first": call.heads(v_first), "v0": call.by_head(v0)}

        # decay w, in-context rate a, removal key -kk and replacement key
        bases: dict[str, Value] = {"w0": depth.decay7, "a0": depth.rate7, "k_k": depth.key7}
        bases["k_a"] = lambda: 1.02
        vectors = {
            name: call.by_head(call.vector(name, computed(value), "heads")) for name, value in bases.items()
        }
        # decays are computed in float32 and rounded to bfloat16 alone: float16 lacks the range
        options = {"rate_scale": self.rate_scale, "decay_dtype": dtype if dtype == jnp.bfloat16 else None}
        keys = call.run(rwkv7_keys, w, a, k, v, **vectors, **residual, residual=has_residual, **options)

        arrays = (r, keys.w, keys.k, keys.v, keys.a, keys.b)
        o, wkv = call.recurrence(chunk_rwkv7, fused_recurrent_rwkv7, arrays, lower_bound=LOWER_BOUND)
        scale, bias = call.group_norm()
        r_k = call.head_vector("r_k", lambda: -0.04)
        bonus = {"scale": scale, "bias": bias, "r_k": r_k}
        y = call.run(rwkv7_readout, o, r, keys.k_bonus, keys.v_bonus, g, **bonus)
        y = call.dense("output", C, _zeros, ("heads", "embed"), y.reshape(x.shape))
        state = call.state.replace(att_shift=mixed.last, wkv=wkv)
        return y, state, keys.v_first.reshape(x.shape)

    def value_residual(
        self, x: jax.Array, v_first: jax.Array | None, lengths: jax.Array | None, norm: Affine | None
    ) -> tuple[jax.Array | None, jax.Array | bool]:
        """``v_first``, None at layer 0, and whether there is a value residual; raises ValueError."""
        layer = self.layer_index
        if isinstance(layer, int) and layer == 0:
            return None, True
        if v_first is None:
            raise ValueError(
                "v_first must be given at layers above 0 (layer_index > 0): it is the third result of layer 0"
            )
        if v_first.shape != x.shape:
            raise ValueError(
                f"v_first must have shape [B, T, C] = {list(x.shape)}, got {list(v_first.shape)}"
            )
        v_first = v_first if norm is not None else zero_beyond(v_first, lengths)
        return v_first, True if isinstance(layer, int) else layer > 0


def _only_if(condition: jax.Array | bool, init: Initializer) -> Initializer:
    """``init`` where ``condition`` holds, which may be traced, else zeros."""
    return lambda key, shape, dtype: init(key, shape, dtype) * jnp.asarray(condition, dtype)


class RWKV7FeedForward(FeedForward):
    """RWKV-7's feed-forward: ``W_v relu(W_k (x + (shift(x) - x) x_k))^2``; fields: `FeedForward`.

    Parameters: x_k [C], key/kernel [C, I], value/kernel [I, C]. The official width I is 4 C.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV7FeedForward
        >>> layer = RWKV7FeedForward(hidden_size=64, layer_index=0, num_layers=2)
        >>> (y, state), _ = layer.init_with_output(jax.random.key(1), jnp.ones((1, 8, 64)))
        >>> y.shape, state.ffn_shift.shape
        ((1, 8, 64), (1, 64))
    """

    mix_names = ("x_k",)
    mix_exponent = 4

    def default_width(self) -> int:
        """The official width of the hidden layer."""
        return 4 * self.hidden_size

    def add_residual(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """``x + out``, both [B, T, C]."""
        return _add_apart(x, out) if isinstance(self.layer_index, jax.core.Tracer) else x + out


@jax.custom_vjp
def _add_apart(x: jax.Array, out: jax.Array) -> jax.Array:
    """``x + out``, an operation apart from the product that makes ``out`` where nothing is differentiated.

    Merged by XLA, a loop over layers would copy x twice in every layer, which takes longer than this sum.
    """
    return x + jax.lax.optimization_barrier(out)


_add_apart.defvjp(lambda x, out: (x + out, None), lambda _, g: (g, g))
