"""How an op runs: its implementation on each device's own part of the arrays, and its gradient.

The parts of `fla_jax.core.op.Op` that JAX calls: ``op`` is an `Op`, ``implementation`` one of its
`Implementation`s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters.ad import zeros_like_aval

from .context import Context
from .names import name_arrays
from .sharding import ROWS, TOKENS, is_explicit, is_manual, per_shard, vary_alike

Arrays = dict[str, jax.Array]


def _by_device(implementation: Any, module: Any, ctx: Context) -> bool:
    """Whether an implementation is called on each device's own part of the arrays."""
    return implementation.opaque or ((is_explicit() or ctx.cp_size > 1) and hasattr(module, "residual_axes"))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _forward(op: Any, implementation: Any, ctx: Context, x: Any) -> tuple[Any, Arrays]:
    """Outputs, and what the implementation keeps; jitted, so that calls outside jit find what the first
    compiled.
    """
    outputs, residuals = _forward_here(op, implementation, ctx, x)
    return _mapped_alike(outputs, x), residuals


def _forward_here(op: Any, implementation: Any, ctx: Context, x: Any) -> tuple[Any, Arrays]:
    module = implementation.load()
    if not _by_device(implementation, module, ctx):
        return module.fwd(ctx, x)
    residual_axes = module.residual_axes(ctx) if ctx.keep else {}
    arrays, tree = jax.tree.flatten(x)
    results, outputs_tree = jax.tree.flatten(op.axes_of_results(ctx))

    def on(ctx: Context, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        outputs, residuals = module.fwd(ctx, jax.tree.unflatten(tree, arrays))
        return (*jax.tree.leaves(outputs), *(residuals[name] for name in residual_axes))

    left, right = [axes for _, axes in op.given(x)], [*results, *residual_axes.values()]
    made = _over_devices(op, implementation, ctx, on, left, right)(*arrays)
    outputs = jax.tree.unflatten(outputs_tree, made[: len(results)])
    return outputs, dict(zip(residual_axes, made[len(results) :]))


@jax.custom_jvp
def _mapped_alike(outputs: Any, x: Any) -> Any:
    """``outputs``; under `jax.vmap` all of them mapped where any of ``x`` is.

    JAX adds the cotangent of an output that is not mapped, which is that of all of the map together, to each
    of the backward's mapped calls: gradients of inputs that are not mapped would have it once for each.
    """
    return _map_alike(outputs, x)


@_mapped_alike.defjvp
def _mapped_alike_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _mapped_alike(*primals), tangents[0]


@jax.custom_batching.custom_vmap
def _map_alike(outputs: Any, x: Any) -> Any:
    return outputs


@_map_alike.def_vmap
def _map_alike_rule(size: int, is_mapped: Any, outputs: Any, x: Any) -> tuple[Any, Any]:
    def mapped(y: jax.Array, already: bool) -> jax.Array:
        return y if already else jnp.broadcast_to(y, (size, *jnp.shape(y)))

    outputs = jax.tree.map(mapped, outputs, is_mapped[0])
    return _map_alike(outputs, x), jax.tree.map(lambda _: True, outputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _backward(op: Any, implementation: Any, ctx: Context, x: Any, residuals: Arrays, cotangents: Any) -> Any:
    """Gradients like ``x``, None for integers; those of arrays without rows may have a leading axis of
    rows, and where devices share tokens those of arrays without tokens one of devices before that.
    """
    module = implementation.load()
    if not _by_device(implementation, module, ctx):
        return module.bwd(ctx, x, residuals, cotangents)
    inputs = [axes for _, axes in op.given(x)]
    made = op.axes_of_results(ctx)
    results = jax.tree.leaves([axes for axes, one in zip(made, cotangents) if one is not None])
    residual_axes = module.residual_axes(ctx)
    floating = [jnp.issubdtype(array.dtype, jnp.floating) for array in jax.tree.leaves(x)]
    arrays, tree = jax.tree.flatten((x, cotangents, tuple(residuals[name] for name in residual_axes)))

    def on(ctx: Context, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        x, cotangents, residuals = jax.tree.unflatten(tree, arrays)
        gradients = jax.tree.leaves(module.bwd(ctx, x, dict(zip(residual_axes, residuals)), cotangents))
        rows = next(
            a.shape[axes.split().index(ROWS)] for a, axes in zip(arrays, left) if ROWS in axes.split()
        )
        return tuple(_with_axes(ctx, g, axes.split(), rows) for g, axes in zip(gradients, right))

    left = [*inputs, *results, *residual_axes.values()]
    summed = [_summed_axes(ctx, axes.split()) for axes in inputs]
    right = [axes for axes, is_floating in zip(summed, floating) if is_floating]
    if ctx.sequence is not None and is_manual():
        # inside jax.shard_map every device has a cotangent of its own for what is the same on all
        for i in range(len(inputs), len(inputs) + len(results)):
            if TOKENS not in left[i].split():
                arrays[i] = jax.lax.psum(arrays[i], ctx.sequence)
    made = _over_devices(op, implementation, ctx, on, left, right)(*arrays)
    remaining = iter(made)
    return jax.tree.unflatten(jax.tree.structure(x), [next(remaining) if f else None for f in floating])


def _over_devices(
    op: Any, implementation: Any, ctx: Context, on: Callable[..., Any], left: list[str], right: list[str]
) -> Any:
    """``on(call, *arrays)`` on every device's own part of the arrays."""
    whole = functools.partial(on, dataclasses.replace(ctx, sequence=None))
    name = op.name if any(one.context_parallel for one in op.implementations) else ""
    own = functools.partial(on, ctx)
    run = per_shard(own, left, right, op.shardable, ctx.sequence, whole, name, implementation.opaque)
    return _differentiated_once(op, implementation, run) if implementation.opaque else run


def _differentiated_once(op: Any, implementation: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, a kernel that a rule calls: to differentiate the rule is an error in words."""
    kernel = jax.custom_jvp(fn)

    @kernel.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        plain = " or ".join(repr(one.name) for one in op.implementations if not one.opaque)
        raise TypeError(
            f"{op.name}: implementation={implementation.name!r} has first derivatives only; second "
            f"derivatives, by reverse mode or by forward mode over it, want implementation={plain}"
        )

    return kernel


def _summed_axes(ctx: Context, axes: list[str]) -> str:
    """The axes of a gradient, with those in front that the op sums over."""
    rows = [] if ROWS in axes or "n" in axes else [ROWS]
    return " ".join([*(["device"] if ctx.cp_size > 1 and TOKENS not in axes else []), *rows, *axes])


def _with_axes(ctx: Context, gradient: jax.Array, axes: list[str], rows: int) -> jax.Array:
    """A gradient with the axes that `_summed_axes` names."""
    split = ctx.cp_size > 1 and axes[0] == "device"
    if gradient.ndim < len(axes) - split:  # one for all rows here: the first row's
        gradient = jnp.pad(gradient[None], ((0, rows - 1), *((0, 0),) * gradient.ndim))
    if split and ctx.sequence is None:  # made from whole rows: the first device's is all of it
        return jnp.pad(gradient[None], ((0, ctx.cp_size - 1), *((0, 0),) * gradient.ndim))
    return gradient[None] if split else gradient


def run(op: Any, implementation: Any, ctx: Context, x: Any) -> Any:
    """The outputs of an `Op` by one of its implementations; differentiable in reverse mode."""
    # JAX has no rule for symbolic zeros in a `jax.shard_map` that is not jitted
    by = _run_jitted if is_manual() else _run
    return by(op, implementation, ctx, vary_alike(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(op: Any, implementation: Any, ctx: Context, x: Any) -> Any:
    return _forward(op, implementation, dataclasses.replace(ctx, keep=False), x)[0]


def _run_fwd(op: Any, implementation: Any, ctx: Context, x: Any) -> tuple[Any, Any]:
    x = custom_vjp_primal_tree_values(x)
    outputs, residuals = _forward(op, implementation, ctx, x)
    # named inside the rule, so that a policy can keep them: see core/names.py
    names = op.output_names or (None,) * len(outputs)
    outputs = op.outputs(*(name_arrays(y, name) for y, name in zip(outputs, names)))
    return outputs, (x, name_arrays(residuals, op.kept_name))


def _run_bwd(op: Any, implementation: Any, ctx: Context, residuals: Any, cotangents: Any) -> tuple[Any]:
    x, kept = residuals
    cotangents = vary_alike(_without_zeros(implementation.load(), cotangents), x)
    leaves, tree = jax.tree.flatten(x)
    gradients = _backward(op, implementation, ctx, x, kept, cotangents)
    gradients = _summed(tree.flatten_up_to(gradients), leaves)  # type: ignore[attr-defined]
    return (jax.tree.unflatten(tree, vary_alike(gradients, x)),)


def _without_zeros(module: Any, cotangents: Any) -> Any:
    """The cotangents of results that nothing depends on: None where the implementation's ``may_be_unused``
    names the result, else zeros.
    """

    def is_zero(one: Any) -> bool:
        return isinstance(one, SymbolicZero)

    def array(one: Any) -> Any:
        return zeros_like_aval(one.aval) if is_zero(one) else one

    unused = {name for name in getattr(module, "unused_cotangents", ()) if is_zero(getattr(cotangents, name))}
    return jax.tree.map(array, cotangents._replace(**dict.fromkeys(unused)), is_leaf=is_zero)


def _summed(gradients: list[Any], primals: list[jax.Array]) -> list[Any]:
    """Gradients with the axes of ``primals``: those with one for each row, or for each of the devices that
    share rows, are summed. All of a shape are in one sum: one kernel, where each would be as long by itself.
    """
    summed, alike = list(gradients), dict[tuple[Any, ...], list[int]]()
    for i, (gradient, primal) in enumerate(zip(gradients, primals)):
        if gradient is not None and gradient.ndim > primal.ndim:
            alike.setdefault((gradient.shape, gradient.dtype, primal.ndim), []).append(i)
    for (shape, _, ndim), places in alike.items():
        more = len(shape) - ndim
        sums = jnp.sum(jnp.stack([gradients[i] for i in places], more), tuple(range(more)))
        for i, one in zip(places, sums):
            summed[i] = one.astype(primals[i].dtype)
    return summed


_run.defvjp(_run_fwd, _run_bwd, symbolic_zeros=True)
_run_jitted = jax.jit(_run, static_argnums=(0, 1, 2), inline=True)
