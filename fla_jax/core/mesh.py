"""The mesh in context: how arrays are sharded on it, and helpers to shard one like another."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

T = TypeVar("T")  # a pytree
Entry = str | tuple[str, ...] | None  # of a PartitionSpec: the mesh axes that split one axis


def mesh_axes(entry: Entry) -> tuple[str, ...]:
    """The mesh axes that one entry of a `PartitionSpec` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_explicit() -> bool:
    """Whether the mesh in context has explicit axes: arrays then carry their shardings in their types."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def is_manual() -> bool:
    """Whether this is traced inside `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def devices_in_mesh() -> int:
    """Number of devices of the mesh in context; 1 without a mesh and inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or AxisType.Manual in mesh.axis_types else mesh.size


def check_mesh(name: str, *trees: PyTree) -> None:
    """Raises ValueError where arrays lie on a mesh with explicit axes and no mesh is in context.

    ``name`` says whose arguments they are.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return
    for x in jax.tree.leaves(trees):
        mesh = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"{name}: an argument lies on a mesh with explicit axes {mesh.axis_names}, and no mesh is in "
                "context: call it within `with jax.set_mesh(mesh):`, or make the mesh with "
                f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
            )


def spec_of(x: jax.Array) -> tuple[Entry, ...]:
    """The mesh axis (or axes, or None) that splits each axis of ``x``, on a mesh with explicit axes."""
    return tuple(jax.typeof(x).sharding.spec)


def reshard(x: jax.Array, *wanted: Entry) -> jax.Array:
    """``x`` with these `spec_of`, on a mesh with explicit axes."""
    return x if spec_of(x) == wanted else jax.sharding.reshard(x, P(*wanted))


def shard_like(x: jax.Array, like: jax.Array, *axes: int | None) -> jax.Array:
    """``x`` with each of its axes split like the given axis of ``like`` (None: whole).

    For zeros, constants and states that are used with ``like``. On meshes without explicit axes: ``x``.
    """
    if not is_explicit():
        return x
    split = spec_of(like)
    return reshard(x, *(None if axis is None else split[axis] for axis in axes))


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Axes of a checked `jax.shard_map` that any of the arrays varies over."""
    return frozenset[str]().union(*map(_varying, arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """``x``, typed as varying over ``axes`` as well."""
    more = tuple(axes - _varying(x))
    return jax.lax.pcast(x, more, to="varying") if more else x


def vary_alike(tree: T, *others: PyTree) -> T:
    """``tree`` with every array typed as varying over each axis of a checked `jax.shard_map` that an array of
    ``tree`` or ``others`` varies over.

    A scan needs one type for its carry, a custom gradient one for each input and its gradient.
    JAX's transpose of this sums cotangents over the axes that an array did not vary over.
    """
    axes = varying_axes(*jax.tree.leaves((tree, others)))
    return jax.tree.map(lambda x: vary(x, axes), tree)
