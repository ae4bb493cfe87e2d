"""Where activations and weights lie on a mesh of devices.

Devices share the batch, and each computes all of its own examples. A mesh axis that splits the batch cannot
split a weight of the same product too: such a weight may be stored in slices, and is gathered when it is used
(FSDP). Any other mesh axis may split heads and hidden channels (tensor parallelism).

On a mesh with explicit axes the types of arrays carry their shardings, and the layers follow them. On any
other mesh XLA decides, within `flax.linen.logical_axis_rules` if there are any. The names of logical axes are
those of MaxText, and ``rank`` of low-rank pairs. Activations have other names (activation_batch,
activation_length, activation_embed, activation_heads, activation_kv, activation_mlp, activation_vocab) than
parameters (vocab, embed, heads, kv, mlp, rank, layers), so that rules can split these and leave those whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ..core.mesh import Entry, is_explicit, is_manual, mesh_axes, reshard, spec_of
from ..core.names import GATHERED, name_arrays

TOKEN_AXES = ("activation_batch", "activation_length")  # the first axes of an array [B, T, ...]
Axes = tuple[str | None, ...]
Dot = Callable[..., jax.Array]
Operands = tuple[jax.Array, jax.Array]

# The activations' name of each axis that a weight shares with the operand or the result of its product.
_OF_ACTIVATIONS = {
    "embed": "activation_embed",
    "heads": "activation_heads",
    "mlp": "activation_mlp",
    "vocab": "activation_vocab",
}


class DotOptions(TypedDict, total=False):
    """Options of `jax.lax.dot_general`."""

    precision: jax.lax.PrecisionLike
    preferred_element_type: DTypeLike | None


class OutSharding(TypedDict, total=False):
    """The option of `jax.lax.dot_general` for the sharding of its result."""

    out_sharding: P


class _AllOptions(DotOptions, OutSharding, total=False):
    pass


@dataclasses.dataclass(frozen=True)
class ActivationSharding:
    """How the activations of a layer call are sharded: resolved once, by `of`; methods read types only.

    Attributes:
        mode: ``"explicit"`` (types carry shardings), ``"manual"`` (inside `jax.shard_map`) or ``"auto"``.
        length: the mesh axis that T is split over, None for whole sequences.
        batch_axes: the mesh axes that B and T are split over; known with explicit axes only.
        num_heads: number of heads along axes named ``"heads"``, none of which a device may split.
        tp: number of devices that share the heads, inside the region of `enter_tp`; 1 outside.
    """

    mode: Literal["auto", "explicit", "manual"]
    length: str | None = None
    batch_axes: tuple[str, ...] = ()
    num_heads: int | None = None
    tp: int = 1

    @classmethod
    def of(cls, x: jax.Array, num_heads: int | None = None) -> ActivationSharding:
        """The sharding of activations with the B and T of ``x`` [B, T, ...] on the mesh in context."""
        length = length_axis(x) if x.ndim == 3 else None
        if is_explicit():
            batch_axes = tuple(axis for entry in spec_of(x)[:2] for axis in mesh_axes(entry))
            return cls("explicit", length, batch_axes, num_heads)
        return cls("manual" if is_manual() else "auto", length, (), num_heads)

    def enter_tp(self, x: jax.Array) -> ActivationSharding:
        """The tensor-parallel region for ``x`` [B, T, C], entered by `to_tp`, left by a `dot` to heads.

        Only where rules split the heads evenly; not for single tokens, which have no backward pass.
        """
        if self.mode == "explicit" or not is_sharded() or x.shape[1] == 1 or self.num_heads is None:
            return self
        sizes = jax.sharding.get_abstract_mesh().shape
        devices = math.prod(sizes.get(axis, 1) for axis in mesh_axes(_activation_spec()[2]))
        return self if self.num_heads % devices else dataclasses.replace(self, tp=devices)

    def to_tp(self, x: jax.Array) -> jax.Array:
        """[B, ...], equal on the devices of a tensor-parallel group, as [tp B, ...] with one copy a device.

        Nothing is communicated. The gradients of the copies may differ: each device carries its summand back
        to here, through mixes, shift and norm, and one [B, T, C] is summed instead of one for every product.
        """
        if self.tp == 1:
            return x
        x = _constrain_tp(jnp.broadcast_to(x, (self.tp, *x.shape)), merged=False)
        return _constrain_tp(x.reshape(-1, *x.shape[2:]), merged=True)

    def unshard(self, weight: jax.Array, logical: Axes) -> jax.Array:
        """A weight for elementwise use with activations: whole along `batch_axes`."""
        if self.mode != "explicit":
            return _unsharded(weight, logical)
        first, *rest = (without(entry, self.batch_axes) for entry in spec_of(weight))
        return name_arrays(reshard(weight, self._divisible(first, logical[0]), *rest), GATHERED)

    def unshard_for_dot(self, x: jax.Array, weight: jax.Array, logical: Axes) -> jax.Array:
        """``weight`` [I, O] for its product with ``x`` [..., I], see `dot`."""
        if self.mode != "explicit":
            return _unsharded(weight, logical)
        *batch, inner = spec_of(x)
        taken = [axis for entry in batch for axis in mesh_axes(entry)]
        stored, out = (without(entry, taken) for entry in spec_of(weight))
        inner = inner or stored
        out = self._divisible(without(out, mesh_axes(inner)), logical[-1])
        return name_arrays(reshard(weight, inner, out), GATHERED)

    def dot(
        self,
        x: jax.Array,
        weight: jax.Array,
        logical: Axes,
        dot_general: Dot | None = None,
        **options: Unpack[DotOptions],
    ) -> jax.Array:
        """``x @ weight``, computed by the devices that have ``x``.

        Args:
            x: [..., I], as a rule [B, T, I]; inside the tensor-parallel region [tp B, T, I].
            weight: [I, O].
            logical: names of the weight's axes.
            dot_general: with the arguments of `jax.lax.dot_general`; None for that function.
            options: of `jax.lax.dot_general`.

        Returns:
            [..., O], split like ``x``, and along O like the weight. A product to heads leaves the
            tensor-parallel region: [B, T, O].
        """
        weight, dot_general = self.unshard_for_dot(x, weight, logical), dot_general or _dot
        if self.tp > 1:
            return self._tp_dot(x, weight, logical[-1] == "heads", dot_general, **options)
        *batch, _ = spec_of(x)
        inner, out = spec_of(weight)
        names = (*TOKEN_AXES, *(None,) * (x.ndim - 3))[: x.ndim - 1]
        before, after = (_OF_ACTIVATIONS.get(axis or "") for axis in logical)
        x = reshard(x, *batch, inner) if self.mode == "explicit" else constrain(x, *names, before)
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        y = dot_general(x, weight, dimensions, **out_sharding(*batch, out), **options)
        return constrain(y, *names, after)

    def _tp_dot(
        self, x: jax.Array, weight: jax.Array, to_heads: bool, dot_general: Dot, **options: Unpack[DotOptions]
    ) -> jax.Array:
        """`dot` of [tp B, T, I]: each copy with its device's slice of [I, heads], or the whole weight."""
        if not to_heads:
            return _constrain_tp(dot_general(x, weight, (((2,), (0,)), ((), ())), **options), merged=True)
        x = _constrain_tp(x.reshape(self.tp, -1, *x.shape[1:]), merged=False)
        weight = weight.reshape(weight.shape[0], self.tp, -1)
        y = jnp.moveaxis(dot_general(x, weight, (((3,), (0,)), ((0,), (1,))), **options), 0, 2)
        return constrain(y.reshape(*y.shape[:2], -1), *TOKEN_AXES, "activation_heads")

    def _divisible(self, entry: Entry, logical: str | None) -> Entry:
        """An entry of `spec_of`, None where its devices would split a head."""
        if logical != "heads" or self.num_heads is None:
            return entry
        sizes = jax.sharding.get_abstract_mesh().shape
        return None if self.num_heads % math.prod(sizes[axis] for axis in mesh_axes(entry)) else entry


def length_axis(x: jax.Array) -> str | None:
    """The mesh axis that T of ``x`` [B, T, ...] is split over, None for whole sequences.

    With explicit axes the type of ``x`` decides, else the rule for ``activation_length``, also inside
    `jax.shard_map`.

    Raises:
        ValueError: T is split over several mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    by_rule = None if is_explicit() else nn.logical_to_mesh_axes((TOKEN_AXES[1],))
    split = spec_of(x)[1] if is_explicit() else by_rule[0] if by_rule else None
    axes = [axis for axis in mesh_axes(split) if mesh.shape.get(axis, 1) > 1]
    if len(axes) > 1:
        raise ValueError(f"T can be split over one mesh axis, got {' and '.join(map(repr, axes))}")
    return axes[0] if axes else None


def check_length(name: str, x: jax.Array, lengths: jax.Array | None) -> None:
    """Raises ValueError unless the devices that share T of ``x`` [B, T, ...] can do so."""
    axis = length_axis(x)
    if axis is None:
        return
    size = jax.sharding.get_abstract_mesh().shape[axis]
    if not is_manual() and x.shape[1] % size:
        raise ValueError(
            f"{name} must have a number of tokens T that is a multiple of mesh axis {axis!r} = {size}, got "
            f"T = {x.shape[1]}; for other T use rules without 'length'"
        )
    if lengths is not None:
        raise ValueError(f"lengths cannot go with tokens over mesh axis {axis!r}; segment_ids can")


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """An activation or a weight with the rules for its axes; as it is with explicit or manual axes."""
    return x if is_explicit() or is_manual() else nn.with_logical_constraint(x, logical)


def is_sharded() -> bool:
    """Whether explicit axes or sharding rules are active."""
    return is_explicit() or (bool(nn.get_logical_axis_rules()) and not is_manual())


def save_all_but_unsharded(
    primitive: jax.extend.core.Primitive, *_: object, name: str | None = None, **__: object
) -> bool:
    """A `jax.checkpoint` policy that recomputes gathered weights and reshaped arrays, and saves all else.

    Saved, the gathered weights of all layers would be the whole model on every device.
    """
    recomputed = ("sharding_constraint", "reshard", "broadcast_in_dim", "reshape")
    return primitive.name not in recomputed and name != GATHERED


def without(entry: Entry, taken: Sequence[str]) -> Entry:
    """An entry of `spec_of` without the mesh axes that are taken."""
    left = tuple(axis for axis in mesh_axes(entry) if axis not in taken)
    return left if len(left) > 1 else left[0] if left else None


def out_sharding(*spec: Entry) -> OutSharding:
    """The option of `jax.lax.dot_general` for a result of this `spec_of`, with explicit axes."""
    return {"out_sharding": P(*spec)} if is_explicit() else {}


def _unsharded(weight: jax.Array, logical: Axes) -> jax.Array:
    """By rules: ``weight`` gathered from where it is stored; its gradient is scattered the same way back."""
    stored = constrain(weight, *logical)
    gathered = constrain(stored, *(_OF_ACTIVATIONS.get(axis or "") for axis in logical))
    return name_arrays(gathered, GATHERED)


def _activation_spec() -> tuple[Entry, ...]:
    """The mesh axes that the rules split batch, tokens and heads over."""
    return tuple(nn.logical_to_mesh_axes((*TOKEN_AXES, "activation_heads")) or ())


def _constrain_tp(x: jax.Array, merged: bool) -> jax.Array:
    """[tp, B, ...], or ``merged`` [tp B, ...], with one copy a device, and [..., T, C] by the rules."""
    batch, tokens, heads = (mesh_axes(entry) for entry in _activation_spec())
    first = (heads + batch,) if merged else (heads, batch or None)
    free = x.ndim - len(first)
    rest = (tokens or None, None) if free == 2 else (P.UNCONSTRAINED,) * free
    return jax.lax.with_sharding_constraint(x, P(*first, *rest))


def _dot(
    x: jax.Array, weight: jax.Array, dimensions: jax.lax.DotDimensionNumbers, **options: Unpack[_AllOptions]
) -> jax.Array:
    """`jax.lax.dot_general`; the cotangent of a float32 result of bfloat16 operands is rounded to bfloat16.

    Both products of the backward pass would otherwise have float32 operands. float16 lacks the range for it.
    """
    wide = options.pop("preferred_element_type", None)
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=dimensions, **options)
    if wide is None or x.dtype != jnp.bfloat16:
        return dot(x, weight, preferred_element_type=wide)
    return _wide_dot(dot, wide, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_dot(dot: Dot, wide: DTypeLike, x: jax.Array, weight: jax.Array) -> jax.Array:
    return dot(x, weight, preferred_element_type=wide)


def _wide_dot_fwd(dot: Dot, wide: DTypeLike, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Operands]:
    return dot(x, weight, preferred_element_type=wide), (x, weight)


def _wide_dot_bwd(dot: Dot, wide: DTypeLike, residuals: Operands, dy: jax.Array) -> Operands:
    _, pull = jax.vjp(dot, *residuals)
    return pull(dy.astype(residuals[0].dtype))


_wide_dot.defvjp(_wide_dot_fwd, _wide_dot_bwd)
