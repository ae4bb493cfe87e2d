"""The layers' common part: fields, checked inputs, projections, norm with token shift and mixes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..core.mesh import check_mesh, shard_like
from ..core.names import name_dense
from ..core.types import Mixed
from ..ops.array_checks import check_shape, floating
from ..ops.layer import norm_shift_mix
from .fields import check_fields
from .fp8 import check_fp8, fp8_dot_of
from .init import Initializer
from .lora import add_lora
from .norm import Affine
from .sharding import ActivationSharding, Axes, DotOptions, check_length
from .shift import last_token

LAYER_NORM_EPS = 1e-5


def with_axes(init: Initializer, axes: Axes, logical_axes: bool) -> Initializer:
    """``init``, its result boxed with the names of its axes if ``logical_axes``."""
    return nn.with_logical_partitioning(init, axes) if logical_axes else init


class Layer(nn.Module):
    """Fields of all RWKV layers.

    Attributes:
        hidden_size: C, channels of input and output.
        layer_index: position in the network, from 0 to ``num_layers - 1``: initial values depend on it. An
            int, or a traced integer inside `flax.linen.scan`.
        num_layers: number of layers of the network.
        dtype: compute dtype; None for the promotion of the input's with ``param_dtype``. States and
            arithmetic on decays and norms are float32 at least.
        param_dtype: dtype of the parameters.
        logical_axes: whether `init` returns parameters boxed with the names of their axes
            (`flax.linen.LogicallyPartitioned`) instead of plain arrays.
        fp8: whether dense projections multiply in FP8 where they have scales (see `RWKVConfig`).

    Example:
        >>> from fla_jax.layers import Layer, RWKV7Attention
        >>> issubclass(RWKV7Attention, Layer)
        True
    """

    hidden_size: int
    layer_index: int | jax.Array = 0
    num_layers: int = 1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    logical_axes: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.name != "parent"]
        values = {name: getattr(self, name) for name in names}
        if self.dtype is None:  # a layer computes in its input's dtype; a configuration must name one
            del values["dtype"]
        check_fields(**values)
        super().__post_init__()

    def weight(self, name: str, init: Initializer, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        """A parameter in ``param_dtype``."""
        return self.param(name, with_axes(init, axes, self.logical_axes), shape, self.param_dtype)

    def checked_input(
        self, x: jax.Array, segment_ids: jax.Array | None, lengths: jax.Array | None, norm: Affine | None
    ) -> jax.Array:
        """``x`` in the compute dtype; raises ValueError or TypeError unless the arguments fit each other."""
        x = floating("x", x)
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x must have shape [B, T, C] with C = hidden_size = {self.hidden_size}, got {list(x.shape)}"
            )
        if x.shape[1] == 0:
            raise ValueError("x must have at least one token, got T = 0")
        check_mesh(type(self).__name__, x, self.variables)
        check_length("x", x, lengths)
        if segment_ids is not None:
            check_integers("segment_ids", segment_ids)
            check_shape("segment_ids", segment_ids, x.shape[:2], "[B, T]")
        check_lengths(lengths, x)
        if lengths is not None and segment_ids is not None:
            raise ValueError("segment_ids and lengths cannot go together: give one of them")
        x = x.astype(jnp.promote_types(x.dtype, self.param_dtype) if self.dtype is None else self.dtype)
        if self.fp8:
            check_fp8(x.dtype)
        # a residual stream, which comes with a norm, is a model's: finite at and beyond `lengths` too
        return x if norm is not None else zero_beyond(x, lengths)


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer: checked inputs, and the layer's parameters applied to activations on their mesh.

    Attributes:
        layer: the layer, whose parameters the methods make or read.
        x: [B, T, C] in the compute dtype.
        shift: [B, C], the token before the first.
        segment_ids: [B, T] integers or None.
        lengths: [B] integers or None.
        norm: scale and bias [C] of a layer norm of ``x``, or None.
        sharding: of the activations.
    """

    layer: Layer
    x: Float[Array, "B T C"]
    shift: Float[Array, "B C"]
    segment_ids: Int[Array, "B T"] | None
    lengths: Int[Array, " B"] | None
    norm: Affine | None
    sharding: ActivationSharding

    def enter_tp(self) -> Self:
        """The call inside its tensor-parallel region: mixes in it sum their gradients over devices once."""
        return dataclasses.replace(self, sharding=self.sharding.enter_tp(self.x))

    def vector(
        self, name: str, init: Initializer, *axes: str | None, shape: tuple[int, ...] | None = None
    ) -> jax.Array:
        """A parameter [C], or of another ``shape``, for elementwise use with activations."""
        weight = self.layer.weight(name, init, shape or (self.layer.hidden_size,), axes)
        return self.sharding.unshard(weight, axes)

    def dense(self, name: str, features: int, init: Initializer, axes: Axes, x: jax.Array) -> jax.Array:
        """``x @ kernel``, kernel [in, out] of the submodule ``name``, plus its `LoRA` if there is one."""
        fp8_dot = fp8_dot_of(self.layer, name, self.sharding) if self.layer.fp8 else None

        def dot_general(
            x: jax.Array, kernel: jax.Array, _: object, **options: Unpack[DotOptions]
        ) -> jax.Array:
            return self.sharding.dot(x, kernel, axes, fp8_dot, **options)

        layer = nn.Dense(
            features,
            use_bias=False,
            dtype=x.dtype,
            param_dtype=self.layer.param_dtype,
            kernel_init=with_axes(init, axes, self.layer.logical_axes),
            dot_general=dot_general,
            name=name,
        )
        return name_dense(add_lora(self.layer, name, x, layer(x), axes, self.sharding))

    def project(self, name: str, features: int, init: Initializer, axes: Axes, x: jax.Array) -> jax.Array:
        """``x @ weight``, the weight [in, out] a parameter of the layer itself."""
        weight = self.layer.weight(name, init, (x.shape[-1], features), axes)
        return name_dense(self.sharding.dot(x, weight.astype(x.dtype), axes))

    def low_rank(
        self,
        name: str,
        rank: int,
        init: Initializer,
        x: jax.Array,
        activation: Callable[[jax.Array], jax.Array] = lambda h: h,
        **options: Unpack[DotOptions],
    ) -> jax.Array:
        """``activation(x @ name1) @ name2``, [C, rank] and [rank, C]; the first starts at zero."""
        h = self.project(f"{name}1", rank, nn.initializers.zeros, ("embed", "rank"), x)
        up = self.layer.weight(f"{name}2", init, (rank, self.layer.hidden_size), ("rank", "heads"))
        return self.sharding.dot(activation(h), up.astype(x.dtype), ("rank", "heads"), **options)

    @functools.cached_property
    def last(self) -> jax.Array:
        """`shift` where the batch and the channels of `x` lie."""
        return shard_like(self.shift, self.x, 0, 2)

    def mix(self, x: jax.Array, mixes: Sequence[jax.Array], **options: Any) -> Mixed:
        """`fla_jax.ops.layer.norm_shift_mix` of ``x`` [B, T, C]."""
        enter = self.sharding.to_tp
        return norm_shift_mix(
            enter(x),
            mixes,
            enter(self.last),
            segment_ids=None if self.segment_ids is None else enter(self.segment_ids),
            sequence_axis=self.sharding.length,
            **options,
        )

    def shift_mix(
        self, mixes: Sequence[jax.Array], y: jax.Array | None = None, normalised: bool = False
    ) -> Mixed:
        """`mix` of the layer's input, its ``last`` that of each example's last token within `lengths`."""
        scale, bias = (None, None) if self.norm is None else self.norm
        mixed = self.mix(self.x, mixes, y=y, scale=scale, bias=bias, normalised=normalised)
        tp = self.sharding.tp > 1
        if self.lengths is None and not tp:
            return mixed
        end = last_token(self.x if mixed.x is None or tp else mixed.x, self.last, self.lengths)
        if self.norm is not None:
            end = norm_shift_mix(end[:, None], mixes[:1], scale=scale, bias=bias).last
        if self.lengths is not None:
            end = jnp.where(self.lengths[:, None] > 0, end, self.last.astype(self.x.dtype))
        return mixed._replace(last=end)


def check_lengths(lengths: jax.Array | None, x: jax.Array) -> None:
    """Raises ValueError or TypeError unless ``lengths`` fit the batch of ``x`` [B, T, ...]."""
    if lengths is None:
        return
    check_integers("lengths", lengths)
    check_shape("lengths", lengths, x.shape[:1], "[B]")


def check_integers(name: str, x: object) -> None:
    """Raises TypeError unless ``x`` is an array of integers."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer array, got {dtype or type(x).__name__}")


def zero_beyond(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``x`` [B, T, ...] with zeros at and beyond ``lengths`` [B].

    Gradients of unused positions are 0 times the value there, which may be NaN.
    """
    if lengths is None:
        return x
    is_token = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(is_token.reshape(*is_token.shape, *[1] * (x.ndim - 2)), x, 0)
