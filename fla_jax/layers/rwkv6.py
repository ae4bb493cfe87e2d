"""RWKV-6 ("Finch", x060): attention and feed-forward."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..ops import chunk_rwkv6, fused_recurrent_rwkv6
from ..ops.layer import rwkv6_decay, rwkv6_readout
from .attention import Attention
from .feed_forward import FeedForward
from .init import computed, orthogonal, symmetric_uniform
from .norm import Affine
from .sharding import DotOptions
from .state import RWKVState

_zeros = nn.initializers.zeros


class RWKV6Attention(Attention):
    """RWKV-6's attention: data-dependent decay and token shift, and a bonus for the current token.

    Parameters are named as in official checkpoints: time_maa_{x,w,k,v,r,g} [C], time_maa_w1 [C, 5 R],
    time_maa_w2 [5, R, C] (order w, k, v, r, g), time_decay [C], time_decay_w1 [C, D], time_decay_w2 [D, C],
    time_faaaa [H, N], {receptance,key,value,gate,output}/kernel [C, C] (transposed against PyTorch),
    ln_x/{scale,bias} [C].

    Attributes:
        proj_low_rank_dim: R, rank of the token shift's low-rank pair; None for the official 32 (64 from C =
            4096 on).
        decay_low_rank_dim: D, rank of the decay's low-rank pair; None for the official 64 (128 from C = 4096
            on).

    The other fields: `Layer` and `Attention`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV6Attention
        >>> layer = RWKV6Attention(hidden_size=64, layer_index=0, num_layers=2, head_dim=16)
        >>> x = jax.random.normal(jax.random.key(0), (1, 8, 64))
        >>> (y, state, v_first), _ = layer.init_with_output(jax.random.key(1), x)
        >>> y.shape, state.wkv.shape, v_first
        ((1, 8, 64), (1, 4, 16, 16), None)
    """

    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T C"],
        state: RWKVState | None = None,
        v_first: None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        norm: Affine | None = None,
    ) -> tuple[Float[Array, "B T C"], RWKVState, None]:
        """Mixes tokens; arguments, results and errors as for `RWKV7Attention`, without a value residual.

        Args:
            x: [B, T, C].
            state: of this layer; None for zeros.
            v_first: None.
            segment_ids: [B, T] integers.
            lengths: [B] integers.
            norm: scale and bias [C].

        Returns:
            ``(y, state, None)``.

        Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024;
        RWKV-LM ``RWKV-v5/src/model.py``.
        """
        if v_first is not None:
            raise ValueError("v_first must be None: RWKV-6 has no value residual")
        call = self.prepare(x, state, segment_ids, lengths, norm)
        x, C, depth, dtype = call.x, self.hidden_size, self.depth, call.x.dtype
        ranks = (32, 64) if C < 4096 else (64, 128)
        R = ranks[0] if self.proj_low_rank_dim is None else self.proj_low_rank_dim
        D = ranks[1] if self.decay_low_rank_dim is None else self.decay_low_rank_dim

        # Token shift. A first mix makes, through a low-rank pair, what is added to the other five.
        mu = {
            name: call.vector(f"time_maa_{name}", computed(functools.partial(depth.mix6, name)), None)
            for name in "xwkvrg"
        }
        first = call.shift_mix([mu["x"]], normalised=norm is not None)
        z = jnp.tanh(call.project("time_maa_w1", 5 * R, _zeros, ("embed", "rank"), first.mixed[0]))
        w2 = call.vector("time_maa_w2", symmetric_uniform(0.01), None, "rank", "embed", shape=(5, R, C))
        tp = call.enter_tp()
        z = tp.sharding.to_tp(z).reshape(-1, x.shape[1], 5, R)
        mix_delta = jnp.einsum("btnr,nrc->nbtc", z, w2.astype(dtype))
        x = x if first.normalised is None else first.normalised
        xw, xk, xv, xr, xg = tp.mix(x, [mu[name] for name in "wkvrg"], mix_delta=mix_delta).mixed

        r = tp.dense("receptance", C, orthogonal(1.0), ("embed", "heads"), xr)
        k = tp.dense("key", C, orthogonal(0.1), ("embed", "heads"), xk)
        v = tp.dense("value", C, orthogonal(1.0), ("embed", "heads"), xv)
        g = tp.dense("gate", C, orthogonal(0.1), ("embed", "heads"), xg)
        # The decay is computed in float32 at least and rounded to bfloat16 alone: float16 lacks the range.
        wide: DotOptions = {"preferred_element_type": jnp.promote_types(dtype, jnp.float32)}
        w = tp.low_rank("time_decay_w", D, symmetric_uniform(0.01), xw, jnp.tanh, **wide)
        time_decay = call.vector("time_decay", computed(depth.decay6), "heads")
        w = rwkv6_decay(w, time_decay, dtype if dtype == jnp.bfloat16 else None)
        u = call.head_vector("time_faaaa", lambda: call.by_head(depth.bonus6()))

        r, k, v, w = map(call.heads, (r, k, v, w))
        o, wkv = call.recurrence(chunk_rwkv6, fused_recurrent_rwkv6, (r, k, v, w, u))
        scale, bias = call.group_norm()
        y = call.run(rwkv6_readout, o, call.heads(g), scale=scale, bias=bias)
        y = call.dense("output", C, _zeros, ("heads", "embed"), y.reshape(x.shape))
        return y, call.state.replace(att_shift=first.last, wkv=wkv), None


class RWKV6FeedForward(FeedForward):
    """RWKV-6's feed-forward: ``sigmoid(W_r x_r) * W_v relu(W_k x_k)^2``; fields: `FeedForward`.

    Parameters: time_maa_{k,r} [C], key/kernel [C, I], value/kernel [I, C], receptance/kernel [C, C]. The
    official width I is ``floor(3.5 C / 32) * 32``, at least 32.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.layers import RWKV6FeedForward
        >>> layer = RWKV6FeedForward(hidden_size=64, layer_index=0, num_layers=2)
        >>> (y, state), _ = layer.init_with_output(jax.random.key(1), jnp.ones((1, 8, 64)))
        >>> y.shape, state.ffn_shift.shape
        ((1, 8, 64), (1, 64))
    """

    mix_names = ("time_maa_k", "time_maa_r")
    mix_exponent = 3
    is_gated = True

    def default_width(self) -> int:
        """The official width of the hidden layer."""
        return max(32, int(3.5 * self.hidden_size) // 32 * 32)
