"""`jax.vmap` of ops: rules for kernels, which JAX cannot map, and for outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .op_spec import BATCH

T = TypeVar("T")  # a pytree


def map_kernel(
    run: Callable[..., PyTree], mapped: PyTree, args: PyTree, operands: PyTree, results: PyTree
) -> PyTree:
    """``run(*args)`` for each entry of the mapped axis, which every result gets in front, on one device.

    The mapped axis is merged into the batch where every result and every mapped operand has a batch axis;
    operands without one are shared by all. Else the entries run one by one, by `jax.lax.map`.

    Args:
        run: a kernel's function.
        mapped: which of ``args`` have it, as their axis 0.
        args: a tuple of trees of arrays.
        operands: the axes of ``args``.
        results: the axes of the results.
    """
    n = next(x.shape[0] for x, is_mapped in zip(*map(jax.tree.leaves, (args, mapped))) if is_mapped)
    if n == 0:  # no kernel runs on nothing
        one = lambda x, is_mapped: jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)
        shapes = jax.eval_shape(run, *jax.tree.map(one, args, mapped))
        return jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), shapes)

    def is_split(axes: str, is_mapped: bool) -> bool:
        return not is_mapped or BATCH in axes.split()

    def expanded(x: jax.Array, is_mapped: bool) -> jax.Array:
        return x if is_mapped else jnp.broadcast_to(x, (n, *x.shape))

    can_merge = all(jax.tree.leaves(jax.tree.map(is_split, operands, mapped)))
    can_merge = can_merge and all(BATCH in axes.split() for axes in jax.tree.leaves(results))
    if not can_merge:
        return jax.lax.map(lambda xs: run(*xs), jax.tree.map(expanded, args, mapped))

    def merge(axes: str, x: jax.Array, is_mapped: bool) -> jax.Array:
        if BATCH not in axes.split():
            return x
        i = axes.split().index(BATCH)
        x = jnp.moveaxis(expanded(x, is_mapped), 0, i)
        return x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :])

    def split(axes: str, y: jax.Array) -> jax.Array:
        i = axes.split().index(BATCH)
        return jnp.moveaxis(y.reshape(*y.shape[:i], n, -1, *y.shape[i + 1 :]), i, 0)

    return jax.tree.map(split, results, run(*jax.tree.map(merge, operands, args, mapped)))


@jax.custom_jvp
def map_alike(outputs: T, x: PyTree) -> T:
    """``outputs``; under `jax.vmap` all of them mapped where any of ``x`` is.

    JAX adds the cotangent of an unmapped output, which is that of all entries together, to each of the
    backward's mapped calls: gradients of unmapped inputs would count it once for each.
    """
    return _map_alike(outputs, x)


@map_alike.defjvp
def _map_alike_jvp(primals: tuple[T, PyTree], tangents: tuple[T, PyTree]) -> tuple[T, T]:
    return map_alike(*primals), tangents[0]


@jax.custom_batching.custom_vmap
def _map_alike(outputs: T, x: PyTree) -> T:
    return outputs


@_map_alike.def_vmap
def _map_alike_rule(n: int, is_mapped: PyTree, outputs: T, x: PyTree) -> tuple[T, PyTree]:
    def mapped(y: jax.Array, already: bool) -> jax.Array:
        return y if already else jnp.broadcast_to(y, (n, *jnp.shape(y)))

    outputs = jax.tree.map(mapped, outputs, is_mapped[0])
    return _map_alike(outputs, x), jax.tree.map(lambda _: True, outputs)
