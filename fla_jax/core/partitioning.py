"""Runs a function on every device's shard of its arrays, in every sharding mode of JAX.

Without this, a kernel under `jax.jit` on several devices is run by each of them on everything, after
gathering it. Axes are named, einsum-like: ``"b t h k"`` are batch, tokens, heads and keys. Devices may split
the axes that an op calls shardable; every other axis is whole, apart from `SEQUENCE_AXES` where ``ctx.cp``
names the mesh axis that splits the tokens. First derivatives are defined outside (core/vjp.py); plain
functions can be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from .batching import map_kernel
from .context import Context, S, X, Y
from .mesh import Entry, devices_in_mesh, is_explicit, is_manual, mesh_axes, vary_alike
from .op_spec import SEQUENCE_AXES, TOKENS, OpSpec

T = TypeVar("T")  # a pytree
Owners = dict[str, Entry]  # the mesh axes that split an axis


def per_shard(
    op: OpSpec[X, Y, S],
    is_opaque: bool,
    ctx: Context[X, S],
    fn: Callable[..., T],
    operands: tuple[PyTree, ...],
    results: PyTree,
    shardable: Sequence[str] | None = None,
) -> Callable[..., T]:
    """``fn(ctx, *args)`` on every device's shard.

    Args:
        op: of which it is a part.
        is_opaque: whether ``fn`` has kernels, which JAX cannot map.
        ctx: with ``cp.axis``, ``fn`` may communicate over it. Where a device has whole sequences after all,
            ``fn`` gets ``ctx.with_whole_sequences()`` and returns results of the same shapes.
        fn: a function of trees of arrays.
        operands: trees like ``args`` with axes (``"b t h k"``) in place of arrays.
        results: the same of the results.
        shardable: axes that devices may split; None for those of the op.
    """
    axes = tuple(op.shardable if shardable is None else shardable)
    split = _partitioned(op, ctx, fn, operands, results, axes)
    if not is_opaque and (is_manual() or is_explicit()):
        return split  # JAX can map and differentiate it
    run = jax.custom_batching.custom_vmap(split)

    @run.def_vmap
    def _(n: int, mapped: PyTree, *args: PyTree) -> tuple[T, PyTree]:
        # the mapped axis is one more that devices may split: each maps over its own entries
        mapped = jax.tree.unflatten(jax.tree.structure(args), jax.tree.leaves(mapped))
        axis = f"map{sum(axis.startswith('map') for axis in axes)}"

        def over(ctx: Context[X, S], *args: PyTree) -> T:
            one = functools.partial(fn, ctx)
            if is_opaque:
                return map_kernel(one, mapped, args, operands, results)
            return jax.vmap(one, jax.tree.map(lambda m: 0 if m else None, mapped))(*args)

        more = jax.tree.map(lambda a, m: f"{axis} {a}" if m else a, operands, mapped)
        out_axes = jax.tree.map(lambda a: f"{axis} {a}", results)
        out = per_shard(op, is_opaque, ctx, over, more, out_axes, (*axes, axis))(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run if is_opaque else _differentiable(run, ctx, fn, operands, results)


def _differentiable(
    run: Callable[..., T],
    ctx: Context[X, S],
    fn: Callable[..., T],
    operands: tuple[PyTree, ...],
    results: PyTree,
) -> Callable[..., T]:
    """``run``, by custom_partitioning, with the derivative of ``fn`` in a `jax.shard_map` over tokens."""
    owners = _owners([], [], (), ctx.cp.axis)
    ins, outs = _specs(operands, owners), _specs(results, owners)
    # not for `run` itself: XLA partitions batch and heads here, and moves more than it must
    by_tokens = jax.shard_map(
        functools.partial(fn, ctx), in_specs=ins, out_specs=outs, axis_names={ctx.cp.axis}, check_vma=False
    )
    again = jax.custom_jvp(run)
    again.defjvp(lambda primals, tangents: jax.jvp(by_tokens, primals, tangents))
    return again


def _partitioned(
    op: OpSpec[X, Y, S],
    ctx: Context[X, S],
    fn: Callable[..., T],
    operands: tuple[PyTree, ...],
    results: PyTree,
    shardable: tuple[str, ...],
) -> Callable[..., T]:
    """``fn`` in the sharding mode of the mesh in context."""
    on_shard, on_whole = functools.partial(fn, ctx), functools.partial(fn, ctx.with_whole_sequences())
    left, right = _leaves(operands), _leaves(results)

    def manual(*args: PyTree) -> T:
        # results vary over whatever any operand varies over, which a kernel does not say
        args = vary_alike(args)
        return vary_alike(on_shard(*args), args)

    def explicit(*args: PyTree) -> T:
        specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(args)]
        owners = _owners(left, specs, shardable, ctx.cp.axis)
        ins, outs = _specs(operands, owners), _specs(results, owners)
        args = jax.tree.map(jax.sharding.reshard, args, ins)
        return jax.shard_map(on_shard, in_specs=ins, out_specs=outs, check_vma=False)(*args)

    if is_manual():
        return manual
    if is_explicit():
        return explicit
    if max(jax.device_count(), devices_in_mesh()) == 1:  # a mesh may be of another machine's devices
        # the program is free of Python callbacks, so it can be exported and cached
        return on_whole
    can_split = any(one.context_parallel for one in op.implementations)
    is_told = ctx.cp.axis is None and can_split and TOKENS not in shardable
    # tokens that are split without a name are an error, so they need not be gathered before that
    free = (*shardable, *((TOKENS,) if is_told else () if ctx.cp.axis is None else SEQUENCE_AXES))
    fixed = tuple(dict.fromkeys(axis for axes in left + right for axis in axes if axis not in free))
    # jitted, so that the constants of plain implementations are its own: custom_partitioning refuses them
    automatic = custom_partitioning(lambda *args: jax.jit(on_whole)(*args))

    def partition(
        mesh: Mesh, args: PyTree, out: PyTree
    ) -> tuple[Mesh, Callable[..., T], PyTree, tuple[PyTree, ...]]:
        if mesh.empty and ctx.cp.axis is not None:
            raise ValueError(
                f"{op.name}: with sequence_axis={ctx.cp.axis!r} an argument of the call, or of the jitted "
                "function around it, must be on the mesh: jax.device_put(x, NamedSharding(mesh, P()))"
            )
        # the partitioner only suggests shardings: an axis that must be whole would be silently wrong
        owners: Owners = {}
        given = [x.sharding for x in jax.tree.leaves((args, out))]
        if all(isinstance(s, NamedSharding) for s in given):
            specs, mesh = [s.spec for s in given], given[0].mesh
            if is_told:
                _refuse_tokens(left, specs, op.name)
            owners = _owners(left + right, specs, shardable, ctx.cp.axis)

        def shardings(like: PyTree, axes: PyTree) -> PyTree:
            leaves = [NamedSharding(mesh, spec) for spec in jax.tree.leaves(_specs(axes, owners))]
            return jax.tree.unflatten(jax.tree.structure(like), leaves)

        return mesh, on_shard, shardings(out, results), tuple(shardings(args, operands))

    rule = " -> ".join(", ".join(jax.tree.leaves(side)) for side in (operands, results))
    automatic.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=fixed)
    if ctx.cp.axis is None:
        return automatic

    constrain = functools.partial(_constrain, ctx.cp.axis)

    def constrained(*args: PyTree) -> T:
        return jax.tree.map(constrain, results, automatic(*jax.tree.map(constrain, operands, args)))

    return constrained


def _leaves(tree: PyTree) -> list[list[str]]:
    return [axes.split() for axes in jax.tree.leaves(tree)]


def _owners(
    arrays: list[list[str]], specs: Sequence[P], shardable: Sequence[str], cp_axis: str | None
) -> Owners:
    """Mesh axes for each axis: the first array that shards it decides, and a mesh axis is used once."""
    owners: Owners = {} if cp_axis is None else dict.fromkeys(SEQUENCE_AXES, cp_axis)
    used: set[str] = set() if cp_axis is None else {cp_axis}
    for axes, spec in zip(arrays, specs):
        for axis, entry in zip(axes, spec):
            on = mesh_axes(entry)
            if axis in shardable and on and axis not in owners and not used & set(on):
                owners[axis] = entry
                used |= set(on)
    return owners


def _specs(tree: T, owners: Owners) -> T:
    return jax.tree.map(lambda axes: P(*(owners.get(axis) for axis in axes.split())), tree)


def _constrain(cp_axis: str, axes: str, x: jax.Array) -> jax.Array:
    """``x`` with its `SEQUENCE_AXES` split: the partitioner cannot know that chunks are split as tokens."""
    if not set(axes.split()) & set(SEQUENCE_AXES):
        return x
    spec = P(*(cp_axis if axis in SEQUENCE_AXES else P.UNCONSTRAINED for axis in axes.split()))
    return jax.lax.with_sharding_constraint(x, spec)


def _refuse_tokens(arrays: list[list[str]], specs: Sequence[P], op: str) -> None:
    """Raises where the partitioner would give a kernel some tokens of a sequence."""
    for axes, spec in zip(arrays, specs):
        for axis, entry in zip(axes, spec):
            if axis == TOKENS and mesh_axes(entry):
                on = " and ".join(map(repr, mesh_axes(entry)))  # several cannot be named
                raise ValueError(
                    f"{op}: axis T of an argument [{', '.join(axes).upper()}] is sharded over mesh axis "
                    f"{on}: name it, sequence_axis={on} (layers: the rule ('length', {on}) in "
                    "flax.linen.logical_axis_rules), or gather the argument by "
                    "jax.lax.with_sharding_constraint"
                )
