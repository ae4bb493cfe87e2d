"""What all layers share: dtypes, logical axes, dense projections, checks."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.mesh import check_mesh, shard_like
from ..core.names import name_dense
from ..ops.layer import norm_shift_mix
from .fields import check_fields
from .init import ByDepth, Initializer, computed
from .norm import Affine, NormParameters
from .sharding import Axes, check_sequence, constrain, enter_tp, product, sequence_axis, tp_size_of, unshard
from .shift import last_token
from .state import RWKVState, check_state, zero_state

LAYER_NORM_EPS = 1e-5


def with_axes(init: Initializer, axes: tuple[str | None, ...], logical_axes: bool) -> Initializer:
    """``init``, its result boxed with the names of its axes if ``logical_axes``."""
    return nn.with_logical_partitioning(init, axes) if logical_axes else init


class Layer(nn.Module):
    """Fields and helpers of the RWKV layers.

    Attributes:
        hidden_size: C, channels of input and output.
        layer_index: position in the network, from 0: initial values depend on it. An int, or a traced integer
            inside `flax.linen.scan`.
        num_layers: number of layers of the network.
        dtype: compute dtype; None for the promotion of the input's with ``param_dtype``. Arithmetic on decays
            and norms is float32 in any case, and so are states; RWKV-7 hands its decays to the op in bfloat16
            where that is the compute dtype.
        param_dtype: dtype of the parameters.
        logical_axes: whether `init` returns parameters boxed with the names of their axes
            (`flax.linen.LogicallyPartitioned`) instead of plain arrays.

    Example:
        >>> from fla_jax.layers import Layer, RWKV6FeedForward, RWKV7Attention
        >>> issubclass(RWKV7Attention, Layer), issubclass(RWKV6FeedForward, Layer)
        (True, True)
        >>> RWKV7Attention(hidden_size=64, head_dim=16, layer_index=1, num_layers=4).num_layers
        4
    """

    hidden_size: int
    layer_index: Any = 0
    num_layers: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    logical_axes: bool = False

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in type(self).__dataclass_fields__ if name != "parent"}
        if self.dtype is None:  # a layer takes its input's, a configuration must name one
            del values["dtype"]
        check_fields(**values)
        super().__post_init__()

    def compute_dtype(self, x: jax.Array) -> Any:
        """Dtype to compute in, for input ``x``."""
        return (
            jnp.dtype(self.dtype) if self.dtype is not None else jnp.promote_types(x.dtype, self.param_dtype)
        )

    def weight(
        self, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> jax.Array:
        """A parameter in ``param_dtype``."""
        return self.param(name, with_axes(init, axes, self.logical_axes), shape, self.param_dtype)

    def vector(self, name: str, init: Initializer, axes: Axes, x: jax.Array, shape: Any = None) -> jax.Array:
        """A parameter [C], or of another ``shape``, for elementwise use with activations of the rows of ``x``
        [B, T, C].
        """
        weight = self.weight(name, init, (self.hidden_size,) if shape is None else shape, axes)
        return unshard(weight, x, axes, self.parts(axes[0]))

    def parts(self, axis: str | None) -> int | None:
        """How many pieces an axis of a parameter consists of that devices must not cut; None for single
        channels.
        """
        return None

    def product(self, x: jax.Array, weight: jax.Array, axes: Axes, **options: Any) -> jax.Array:
        """``x @ weight``, see `placement.dot`."""
        return product(x, weight, axes, self.parts(axes[-1]), **options)

    def dense(
        self,
        name: str,
        features: int,
        init: Initializer,
        axes: tuple[str | None, ...],
        x: jax.Array,
        tp_size: int = 1,
    ) -> jax.Array:
        """``x @ kernel``, kernel [in, out]; ``copies`` as in `placement.dot`."""

        def dot_general(x: jax.Array, kernel: jax.Array, _: Any, **options: Any) -> jax.Array:
            return self.product(x, kernel, axes, tp_size=tp_size, **options)

        layer = nn.Dense(
            features,
            use_bias=False,
            dtype=x.dtype,
            param_dtype=self.param_dtype,
            kernel_init=with_axes(init, axes, self.logical_axes),
            dot_general=dot_general,
            name=name,
        )
        return name_dense(layer(x))

    def shift_and_mix(
        self,
        x: jax.Array,
        mixes: list[jax.Array],
        last: jax.Array,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None,
        norm: Affine | None,
        y: jax.Array | None = None,
        normalised: bool = False,
        tp_size: int = 1,
    ):
        """`fla_jax.ops.layer.norm_shift_mix`, whose ``last`` is that of each row's last token with
        ``lengths``.

        ``mixed`` are `placement.enter_tp` where ``copies`` is not 1.
        """
        scale, bias = (None, None) if norm is None else norm
        last = shard_like(last, x, 0, 2)
        mixed = norm_shift_mix(
            enter_tp(x, tp_size),
            mixes,
            enter_tp(last, tp_size),
            y=y,
            scale=scale,
            bias=bias,
            segment_ids=None if segment_ids is None else enter_tp(segment_ids, tp_size),
            normalised=normalised,
            sequence_axis=sequence_axis(x),
        )
        if lengths is None and tp_size == 1:
            return mixed
        end = last_token(x if mixed.x is None or tp_size > 1 else mixed.x, last, lengths)
        if norm is not None:
            end = norm_shift_mix(end[:, None], mixes[:1], scale=scale, bias=bias).last
        if lengths is None:
            return mixed._replace(last=end)
        return mixed._replace(last=jnp.where(lengths[:, None] > 0, end, last.astype(x.dtype)))

    def prepare_input(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None,
        norm: Affine | None,
    ) -> jax.Array:
        """``x`` in the compute dtype; raises unless the arguments fit each other.

        A residual stream, which comes with a ``norm``, is a model's, finite behind ``lengths`` too.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x must have shape [B, T, C] with C = hidden_size = {self.hidden_size}, got {list(x.shape)}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x must have a floating-point dtype, got {x.dtype}")
        if x.shape[1] == 0:
            raise ValueError("x must hold at least one token, got T = 0")
        check_mesh(type(self).__name__, x, self.variables)
        check_sequence("x", x, lengths)
        if segment_ids is not None:
            if segment_ids.shape != x.shape[:2]:
                raise ValueError(
                    f"segment_ids must have shape [B, T] = {list(x.shape[:2])}, got {list(segment_ids.shape)}"
                )
            if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
                raise TypeError(f"segment_ids must be integers, got {segment_ids.dtype}")
        check_lengths(lengths, x)
        if lengths is not None and segment_ids is not None:
            raise ValueError("segment_ids and lengths cannot go together: a row is packed or padded")
        x = x.astype(self.compute_dtype(x))
        return x if norm is not None else before_end(x, lengths)


def check_lengths(lengths: jax.Array | None, x: jax.Array) -> None:
    """Raises unless there is one of ``lengths`` for each row of ``x`` [B, T, ...]."""
    if lengths is None:
        return
    if lengths.shape != x.shape[:1]:
        raise ValueError(f"lengths must have shape [B] = {[x.shape[0]]}, got {list(lengths.shape)}")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")


def before_end(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``x`` [B, T, ...], zeros behind ``lengths`` [B]: gradients of what is not used are 0 times what stands
    there, and that may be NaN.
    """
    if lengths is None:
        return x
    is_token = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(is_token.reshape(*is_token.shape, *[1] * (x.ndim - 2)), x, 0)


class FeedForward(Layer):
    """Fields of the feed-forward layers (RWKV calls them channel mix).

    Attributes:
        intermediate_size: width of the hidden layer; None for the official one.

    The other fields: `Layer`.

    Example:
        >>> from fla_jax.layers import FeedForward, RWKV7FeedForward
        >>> layer = RWKV7FeedForward(hidden_size=64, intermediate_size=96)
        >>> isinstance(layer, FeedForward), layer.intermediate_size
        (True, 96)
    """

    intermediate_size: int | None = None

    def prepare(
        self,
        x: jax.Array,
        shift: jax.Array | None,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None = None,
        norm: Affine | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Checked input and shift in the compute dtype."""
        x = self.prepare_input(x, segment_ids, lengths, norm)
        want = (x.shape[0], self.hidden_size)
        if shift is None:
            return x, jnp.zeros(want, x.dtype)
        if isinstance(shift, RWKVState):
            raise TypeError("shift must be an array [B, C] such as state.ffn_shift, got an RWKVState")
        if not hasattr(shift, "shape"):
            raise TypeError(f"shift must be an array [B, C], got {type(shift).__name__}")
        if shift.shape != want:
            raise ValueError(f"shift must have shape [B, C] = {list(want)}, got {list(shift.shape)}")
        return x, shift


class Attention(Layer):
    """Fields and helpers of the attention layers (RWKV calls them time mix).

    Attributes:
        head_dim: channels per head, K = V.
        chunk_size: tokens per chunk of the op; None for the implementation's own choice.
        implementation: which implementation of the op runs; None for the best that qualifies.

    The other fields: `Layer`.

    Example:
        >>> from fla_jax.layers import Attention, RWKV7Attention
        >>> layer = RWKV7Attention(hidden_size=64, head_dim=16, implementation="xla")
        >>> isinstance(layer, Attention), layer.init_state(batch=2).wkv.shape
        (True, (2, 4, 16, 16))
    """

    head_dim: int = 64
    chunk_size: int | None = None
    implementation: str | None = None

    @nn.nowrap
    def init_state(self, batch: int) -> RWKVState:
        """The state before the first token; needs no parameters."""
        return zero_state(
            batch, self.hidden_size, self.head_dim, self.param_dtype if self.dtype is None else self.dtype
        )

    @property
    def depth(self) -> ByDepth:
        """Initial values for this layer."""
        return ByDepth(self.layer_index, self.num_layers, self.hidden_size, self.head_dim)

    def prepare(
        self,
        x: jax.Array,
        state: RWKVState | None,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None = None,
        norm: Affine | None = None,
    ) -> tuple[jax.Array, RWKVState]:
        """Checked input in the compute dtype, and state."""
        x = self.prepare_input(x, segment_ids, lengths, norm)
        zeros = zero_state(x.shape[0], self.hidden_size, self.head_dim, x.dtype)
        if state is None:
            return x, zeros
        check_state(state, zeros)
        return x, state

    def parts(self, axis: str | None) -> int | None:
        """Heads."""
        return self.hidden_size // self.head_dim if axis == "heads" else None

    def tp_size(self, x: jax.Array) -> int:
        """For `placement.enter_tp` of ``x`` [B, T, C]."""
        return tp_size_of(x, self.hidden_size // self.head_dim)

    def heads(self, x: jax.Array) -> jax.Array:
        """[B, T, C] -> [B, T, H, N]."""
        x = x.reshape(*x.shape[:-1], -1, self.head_dim)
        return constrain(x, "batch", "length", "activation_heads", "kv")

    def run(
        self,
        chunked: Any,
        recurrent: Any,
        arrays: tuple[jax.Array, ...],
        state: RWKVState,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None = None,
        **options: Any,
    ):
        """The op on [B, T, H, N] arrays, r the first: output and final state [B, H, K, V]."""
        T = arrays[0].shape[1]
        if lengths is not None:
            # A token that is 0 in every input but r leaves the state as it is. Selected and not multiplied:
            # what stands behind a row's end may be anything.
            r, *others = arrays
            arrays = (r, *(before_end(x, lengths) if x.ndim == 4 else x for x in others))
        op = recurrent
        if not isinstance(T, int) or T > 1:  # a symbolic T is refused by the op, in words
            op, options = chunked, {"chunk_size": self.chunk_size, **options}
        else:
            options.pop("lower_bound", None)
        arrays = tuple(shard_like(x, arrays[0], 0, 1, 2, None) if x.ndim == 4 else x for x in arrays)
        start = constrain(
            shard_like(state.wkv, arrays[0], 0, 2, None, None), "batch", "activation_heads", "kv", None
        )
        o, wkv = op(
            *arrays,
            initial_state=start,
            output_final_state=True,
            segment_ids=segment_ids,
            implementation=self.implementation,
            sequence_axis=sequence_axis(arrays[0]),
            **options,
        )
        # in the dtype of `zero_state`, also where parameters are wider than what is computed with them
        wkv = wkv.astype(jnp.promote_types(arrays[0].dtype, jnp.float32))
        return constrain(o, "batch", "length", "activation_heads", "kv"), wkv

    def group_norm(self, x: jax.Array) -> Affine:
        """Scale and bias [H, N] of the norm of every head on its own, for use with activations like ``x``.

        Its eps is 64e-5 whatever the size of a head.
        """
        scale, bias = NormParameters(
            self.hidden_size,
            self.param_dtype,
            with_axes(computed(self.depth.depth_scale), ("heads",), self.logical_axes),
            with_axes(nn.initializers.zeros, ("heads",), self.logical_axes),
            name="ln_x",
        )(x, self.hidden_size // self.head_dim)
        return self.by_head(scale), self.by_head(bias)

    def by_head(self, x: jax.Array) -> jax.Array:
        """[C] -> [H, N]."""
        return x.reshape(-1, self.head_dim)
