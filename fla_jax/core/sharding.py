"""Makes an opaque kernel shardable, in every sharding mode of JAX, and mappable by `jax.vmap`.

Without this, a kernel under `jax.jit` on several devices is run by each of them on everything, after
gathering it.

Axes are named, einsum-like: ``"b t h k"`` are rows, tokens, heads and keys. Devices may own slices of the
axes that an op calls shardable (rows and heads, which never see each other in a recurrence); every other axis
stays whole, but for `ALONG` where a call is told which mesh axis splits its rows. Differentiation happens
outside (core/op.py), so the kernel sees no tangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, TOKENS = "b", "t"
# axes that are split where tokens are: tokens, their chunks and stretches, and what there is one of a device
ALONG = (TOKENS, "chunk", "kept", "stretch", "device")
Axes = Sequence[str]  # of several arrays, such as ["b t h k", "b h k v"]
Names = tuple[tuple[str, ...], ...]  # the same, split
Kernel = Callable[..., tuple[jax.Array, ...]]


def _split(axes: Axes) -> Names:
    return tuple(tuple(names.split()) for names in axes)


def _owners(
    names: Names, specs: Sequence[Any], shardable: Sequence[str], sequence: str | None
) -> dict[str, Any]:
    """Mesh axes for each axis: the first array that shards it decides, and a mesh axis is used once."""
    owners: dict[str, Any] = {} if sequence is None else dict.fromkeys(ALONG, sequence)
    used: set[str] = set() if sequence is None else {sequence}
    for axes, spec in zip(names, specs):
        for axis, entry in zip(axes, spec):
            on = mesh_axes(entry)
            if axis in shardable and on and axis not in owners and not used & set(on):
                owners[axis] = entry
                used |= set(on)
    return owners


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a `PartitionSpec` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_explicit() -> bool:
    """Whether the mesh in context has explicit axes: arrays then carry their shardings in their types."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def check_mesh(name: str, *trees: Any) -> None:
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


def spec_of(x: jax.Array) -> tuple[Any, ...]:
    """On a mesh with explicit axes, the mesh axis (or axes, or None) that each axis of ``x`` is split
    over.
    """
    return tuple(jax.typeof(x).sharding.spec)


def reshard(x: jax.Array, *wanted: Any) -> jax.Array:
    """``x`` with these `spec_of`, on a mesh with explicit axes."""
    return x if spec_of(x) == wanted else jax.sharding.reshard(x, P(*wanted))


def shard_like(x: jax.Array, like: jax.Array, *axes: int | None) -> jax.Array:
    """``x``, each of its axes split like the given axis of ``like`` (None: whole); ``x`` itself on other
    meshes.

    For what comes from elsewhere and is used with ``like``: zeros, constants, states.
    """
    if not is_explicit():
        return x
    split = spec_of(like)
    return reshard(x, *(None if axis is None else split[axis] for axis in axes))


def _specs(names: Names, owners: dict[str, Any]) -> tuple[P, ...]:
    return tuple(P(*(owners.get(axis) for axis in axes)) for axes in names)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Axes of a checked `jax.shard_map` that any of the arrays varies over."""
    return frozenset[str]().union(*map(_varying, arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """``x``, said to vary over ``axes`` as well."""
    more = tuple(axes - _varying(x))
    return jax.lax.pcast(x, more, to="varying") if more else x


def vary_alike(tree: Any, *others: Any) -> Any:
    """``tree``, all its arrays said to vary over every axis of a checked `jax.shard_map` that an array of it
    or of ``others`` varies over.

    A scan wants one type for what it carries, and a custom gradient one for each input and its gradient.
    JAX's transpose of this sums cotangents over the axes that an array did not vary over.
    """
    axes = varying_axes(*jax.tree.leaves((tree, others)))
    return jax.tree.map(lambda x: vary(x, axes), tree)


def devices_in_mesh() -> int:
    """How many devices share the arrays being traced, as far as the mesh in context tells.

    1 without a mesh, and inside `jax.shard_map`, where every device has arrays of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or AxisType.Manual in mesh.axis_types else mesh.size


def is_manual() -> bool:
    """Whether this is traced inside `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def per_shard(
    fn: Kernel,
    operands: Axes,
    results: Axes,
    shardable: Sequence[str],
    sequence: str | None = None,
    whole: Kernel | None = None,
    name: str = "",
    opaque: bool = True,
) -> Kernel:
    """``fn`` (arrays -> tuple of arrays) on every device's own part of the ``shardable`` axes.

    Args:
        fn: what each device does.
        operands: axes of its arguments.
        results: axes of its results.
        shardable: axes that devices may share.
        sequence: a mesh axis whose devices share the axes `ALONG` too; ``fn`` may communicate over it.
        whole: with it, the same for whole rows, with results of the same shapes.
        name: of an op that could be told ``sequence``: an error says so where its tokens are split.
        opaque: whether ``fn`` has kernels, which JAX cannot map.

    `jax.vmap` maps what is not opaque. Of a kernel it merges the mapped axis into the rows, where every
    result and every mapped operand has rows; operands without rows are shared by all. Else it maps one by
    one, by `jax.lax.map`.
    """
    left, right = _split(operands), _split(results)
    run = _partitioned(fn, whole or fn, left, right, shardable, sequence, name)
    run = jax.custom_batching.custom_vmap(run)

    @run.def_vmap
    def _(n: int, mapped: Sequence[bool], *args: jax.Array):
        if not opaque:
            axis = f"map{sum(axis.startswith('map') for axis in shardable)}"
            over = functools.partial(jax.vmap, in_axes=[0 if m else None for m in mapped])
            again = per_shard(
                over(fn),
                [f"{axis} {axes}" if m else axes for axes, m in zip(operands, mapped)],
                [f"{axis} {axes}" for axes in results],
                (*shardable, axis),
                sequence,
                over(whole or fn),
                name,
                opaque,
            )
            return again(*args), (True,) * len(right)
        one_by_one = not all(ROWS in axes for axes, m in zip(left, mapped) if m) or not all(
            ROWS in a for a in right
        )
        if one_by_one:
            args = tuple(x if m else jnp.broadcast_to(x, (n, *x.shape)) for x, m in zip(args, mapped))
            return jax.lax.map(lambda xs: run(*xs), args), (True,) * len(right)
        folded = []
        for x, m, axes in zip(args, mapped, left):
            if ROWS in axes:
                x = _fold(x if m else jnp.broadcast_to(x, (n, *x.shape)), axes)
            folded.append(x)
        return tuple(_unfold(y, n, axes) for y, axes in zip(run(*folded), right)), (True,) * len(right)

    return run


def _partitioned(
    fn: Kernel,
    whole: Kernel,
    left: Names,
    right: Names,
    shardable: Sequence[str],
    sequence: str | None,
    name: str,
) -> Kernel:
    told = sequence is None and name and TOKENS not in shardable
    # where tokens are split and nobody said so the caller is told, so they do not have to be gathered first
    free = (*shardable, *((TOKENS,) if told else () if sequence is None else ALONG))
    fixed = tuple(dict.fromkeys(axis for axes in left + right for axis in axes if axis not in free))
    # jitted, so that the constants of plain forms are its own: custom_partitioning refuses them
    automatic = custom_partitioning(lambda *args: jax.jit(whole)(*args))

    def partition(mesh, arg_shapes, result_shape):
        # the partitioner only suggests shardings: returned as they come, an axis that must stay whole would
        # be silently wrong
        args, outs = jax.tree.leaves(arg_shapes), jax.tree.leaves(result_shape)
        owners, given = {}, [x.sharding for x in (*args, *outs)]
        if all(isinstance(s, NamedSharding) for s in given):
            specs, mesh = [s.spec for s in given], given[0].mesh
            if told:
                _refuse_tokens(left, specs, name)
            owners = _owners(left + right, specs, shardable, sequence)
        ins, results = ([NamedSharding(mesh, s) for s in _specs(side, owners)] for side in (left, right))
        return mesh, fn, jax.tree.unflatten(jax.tree.structure(result_shape), results), tuple(ins)

    rule = " -> ".join(", ".join(" ".join(axes) for axes in side) for side in (left, right))
    automatic.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=fixed)

    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and AxisType.Manual in mesh.axis_types:
            # results vary over what any operand varies over, which a kernel does not say
            args = vary_alike(args)
            return vary_alike(fn(*args), args)
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            owners = _owners(left, [jax.typeof(x).sharding.spec for x in args], shardable, sequence)
            ins, outs = _specs(left, owners), _specs(right, owners)
            args = tuple(jax.sharding.reshard(x, spec) for x, spec in zip(args, ins))
            return jax.shard_map(fn, in_specs=ins, out_specs=outs, check_vma=False)(*args)
        if jax.device_count() == 1:
            # nothing to partition; the program stays free of Python callbacks, so it can be exported and
            # cached
            return whole(*args)
        if sequence is None:
            return automatic(*args)
        args = tuple(_along(x, axes, sequence) for x, axes in zip(args, left))
        return tuple(_along(y, axes, sequence) for y, axes in zip(automatic(*args), right))

    return run


def _along(x: jax.Array, axes: tuple[str, ...], sequence: str) -> jax.Array:
    """``x`` held to its part of `ALONG`: the partitioner cannot know that chunks are split as tokens are."""
    if not set(axes) & set(ALONG):
        return x
    spec = P(*(sequence if axis in ALONG else P.UNCONSTRAINED for axis in axes))
    return jax.lax.with_sharding_constraint(x, spec)


def _refuse_tokens(names: Names, specs: Sequence[Any], op: str) -> None:
    """Raises where the partitioner hands a kernel a part of its rows."""
    for axes, spec in zip(names, specs):
        for axis, entry in zip(axes, spec):
            if axis == TOKENS and mesh_axes(entry):
                on = " and ".join(map(repr, mesh_axes(entry)))  # several cannot be named
                raise ValueError(
                    f"{op}: axis T of an argument [{', '.join(axes).upper()}] is sharded over mesh axis "
                    f"{on}: name it, sequence_axis={on} (layers: the rule ('length', {on}) in "
                    "flax.linen.logical_axis_rules), or gather the argument by "
                    "jax.lax.with_sharding_constraint"
                )


def _fold(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    i = axes.index(ROWS)
    x = jnp.moveaxis(x, 0, i)
    return x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :])


def _unfold(x: jax.Array, n: int, axes: tuple[str, ...]) -> jax.Array:
    i = axes.index(ROWS)
    return jnp.moveaxis(x.reshape(*x.shape[:i], n, -1, *x.shape[i + 1 :]), i, 0)
