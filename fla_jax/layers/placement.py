"""Where activations and weights lie on a mesh of devices: the one place where the layers say so.

Devices share the rows of a batch, and each makes all that the layers make of its rows. A weight may be stored
in parts; but a mesh axis that splits the rows of a product cannot split its weight as well, so there the
weight is gathered when it is used (FSDP). Any other mesh axis may split heads and hidden channels (tensor
parallelism).

On a mesh with explicit axes arrays carry their shardings in their types, and all that stands here follows
them. On any other mesh XLA decides, and `flax.linen.logical_axis_rules`, where there are any, hold it to the
plan. Activations have names of axes of their own (batch, length, act_embed, act_heads, act_mlp, act_vocab),
so that a rule can split parameters (vocab, embed, heads, kv, mlp, rank, layers) and leave activations whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..core.sharding import mesh_axes

Axes = tuple[str | None, ...]

# The activations' name for each axis that a weight shares with its product's operand or result.
_OF_ACTIVATIONS = {"embed": "act_embed", "heads": "act_heads", "mlp": "act_mlp", "vocab": "act_vocab"}


def is_explicit() -> bool:
    """Whether the mesh in context has explicit axes."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def entries(x: jax.Array) -> tuple[Any, ...]:
    """On a mesh with explicit axes, the mesh axis (or axes, or None) that each axis of ``x`` is split
    over.
    """
    return tuple(jax.typeof(x).sharding.spec)


def place(x: jax.Array, *wanted: Any) -> jax.Array:
    """``x`` with these `entries`, on a mesh with explicit axes."""
    return x if entries(x) == wanted else jax.sharding.reshard(x, P(*wanted))


def beside(x: jax.Array, like: jax.Array, *axes: int | None) -> jax.Array:
    """``x``, each of its axes split like the given axis of ``like`` (None: whole); ``x`` itself on other
    meshes.

    For what comes from elsewhere and is used with ``like``: zeros, states.
    """
    if not is_explicit():
        return x
    split = entries(like)
    return place(x, *(None if axis is None else split[axis] for axis in axes))


def hold(x: jax.Array, *names: str | None) -> jax.Array:
    """Holds an activation, or a weight, to the rules for its axes; ``x`` itself on a mesh with explicit
    axes.
    """
    return x if is_explicit() else nn.with_logical_constraint(x, names)


def beyond(entry: Any, taken: Sequence[str]) -> Any:
    """An entry of `entries` without the mesh axes that are taken."""
    left = tuple(axis for axis in mesh_axes(entry) if axis not in taken)
    return left if len(left) > 1 else left[0] if left else None


def whole_parts(entry: Any, parts: int | None) -> Any:
    """An entry of `entries`, or None where its devices could not share ``parts`` (heads) evenly."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return (
        None if parts is not None and parts % math.prod(sizes[axis] for axis in mesh_axes(entry)) else entry
    )


def gathered(weight: jax.Array, x: jax.Array, parts: int | None = None) -> jax.Array:
    """A weight that is used elementwise with ``x`` [B, T, C]; ``weight`` itself but on a mesh with explicit
    axes.

    There it is made whole along the mesh axes that split the rows of ``x``. ``parts``: see `product`, of its
    axis 0.
    """
    if not is_explicit():
        return weight
    taken = [axis for entry in entries(x)[:2] for axis in mesh_axes(entry)]
    first, *rest = (beyond(entry, taken) for entry in entries(weight))
    return place(weight, whole_parts(first, parts), *rest)


def product(
    x: jax.Array, weight: jax.Array, axes: Axes, parts: int | None = None, **options: Any
) -> jax.Array:
    """``x @ weight``, computed where the rows are.

    Args:
        x: [..., I], [B, T, I] as a rule.
        weight: [I, O].
        axes: names of the weight's axes.
        parts: how many pieces O consists of that no device may own a fraction of (heads); None for O itself.
        options: of `jax.lax.dot_general`.

    Returns:
        [..., O], its rows split like those of ``x``, and O like the weight's where that leaves the parts
        whole.
    """
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    if is_explicit():
        *rows, inner = entries(x)
        taken = [axis for entry in rows for axis in mesh_axes(entry)]
        stored, out = (beyond(entry, taken) for entry in entries(weight))
        inner = inner or stored
        out = whole_parts(beyond(out, mesh_axes(inner)), parts)
        x, weight = place(x, *rows, inner), place(weight, inner, out)
        return jax.lax.dot_general(x, weight, contract, out_sharding=P(*rows, out), **options)
    before, after = (_OF_ACTIVATIONS.get(axis or "") for axis in axes)
    names = ("batch", "length", *(None,) * (x.ndim - 3))[: x.ndim - 1]
    return hold(jax.lax.dot_general(hold(x, *names, before), weight, contract, **options), *names, after)
