"""Makes an opaque kernel shardable over rows and heads, in every sharding mode of JAX, and mappable by `jax.vmap`.

Without this, a kernel under `jax.jit` on several devices is run by each of them on everything, after gathering it.

A rule names the axes of operands and results, einsum-like: ``"b t h k, b h k v -> b t h v"``. Devices may own slices of ``b`` (rows) and ``h`` (heads), which
never see each other in these ops; every other axis stays whole. Differentiation happens outside (ops/vjp.py), so the kernel sees no tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SHARDED = ("b", "h")

Names = tuple[tuple[str, ...], ...]


def _names(side: str) -> Names:
    return tuple(tuple(operand.split()) for operand in side.split(","))


def _owners(names: Names, specs: Sequence[Any]) -> dict[str, Any]:
    """Mesh axes for each factor: the first operand that shards a factor decides, and a mesh axis is used once."""
    owners: dict[str, Any] = {}
    used: set[str] = set()
    for factors, spec in zip(names, specs):
        for factor, entry in zip(factors, spec):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            if factor in SHARDED and axes and factor not in owners and not used & set(axes):
                owners[factor] = entry
                used |= set(axes)
    return owners


def _specs(names: Names, owners: dict[str, Any]) -> tuple[P, ...]:
    return tuple(P(*(owners.get(factor) for factor in factors)) for factors in names)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def varying_axes(*args: jax.Array) -> frozenset[str]:
    """Axes of a checked `jax.shard_map` that any of the arrays varies over."""
    return frozenset[str]().union(*map(_varying, args))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """``x``, said to vary over ``axes`` as well."""
    return jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") if axes - _varying(x) else x


def _direct(fn: Callable[..., Any], *args: jax.Array) -> Any:
    """Inside `jax.shard_map` (or without a mesh): the kernel as it is. Its results vary over what any operand varies over, which a kernel does not say."""
    axes = varying_axes(*args)
    return jax.tree.map(lambda y: vary(y, axes), fn(*args))


def partitioned(fn: Callable[..., tuple[jax.Array, ...]], rule: str, fold: bool = True) -> Callable[..., tuple[jax.Array, ...]]:
    """``fn`` (arrays -> tuple of arrays), sharded as ``rule`` says.

    ``fold``: `jax.vmap` merges the mapped axis into ``b``, which every operand and result must then have; else it maps one by one, by `jax.lax.map`.
    """
    left, right = map(_names, rule.split("->"))
    whole = tuple(dict.fromkeys(f for factors in left + right for f in factors if f not in SHARDED))
    automatic = custom_partitioning(lambda *args: fn(*args))

    def partition(mesh, arg_shapes, result_shape):
        # the partitioner only suggests shardings: returned as they come, an axis that must stay whole would be silently wrong
        args, outs = jax.tree.leaves(arg_shapes), jax.tree.leaves(result_shape)
        owners, given = {}, [x.sharding for x in (*args, *outs)]
        if all(isinstance(s, NamedSharding) for s in given):
            owners, mesh = _owners(left + right, [s.spec for s in given]), given[0].mesh
        ins, results = ([NamedSharding(mesh, s) for s in _specs(side, owners)] for side in (left, right))
        return mesh, fn, jax.tree.unflatten(jax.tree.structure(result_shape), results), tuple(ins)

    automatic.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole)

    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and AxisType.Manual in mesh.axis_types:
            return _direct(fn, *args)
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            owners = _owners(left, [jax.typeof(x).sharding.spec for x in args])
            ins, outs = _specs(left, owners), _specs(right, owners)
            args = tuple(jax.sharding.reshard(x, spec) for x, spec in zip(args, ins))
            return jax.shard_map(fn, in_specs=ins, out_specs=outs, check_vma=False)(*args)
        if jax.device_count() == 1:  # nothing to partition; the program stays free of Python callbacks, so it can be exported and cached
            return fn(*args)
        return automatic(*args)

    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def _(n: int, mapped: Sequence[bool], *args: jax.Array):
        args = tuple(x if m else jnp.broadcast_to(x, (n, *x.shape)) for x, m in zip(args, mapped))
        if not fold:
            return jax.lax.map(lambda xs: call(*xs), args), (True,) * len(right)
        out = tuple(_unfold(y, n, f) for y, f in zip(call(*map(_fold, args, left)), right))
        return out, (True,) * len(right)

    return call


def _fold(x: jax.Array, factors: tuple[str, ...]) -> jax.Array:
    i = factors.index("b")
    x = jnp.moveaxis(x, 0, i)
    return x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :])


def _unfold(x: jax.Array, n: int, factors: tuple[str, ...]) -> jax.Array:
    i = factors.index("b")
    return jnp.moveaxis(x.reshape(*x.shape[:i], n, -1, *x.shape[i + 1 :]), i, 0)


def devices_in_mesh() -> int:
    """How many devices share rows and heads of the arrays being traced, as far as the mesh in context tells (1 without one, and inside `jax.shard_map`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or AxisType.Manual in mesh.axis_types else mesh.size
