"""The gradient of an op: its implementation's ``fwd`` and ``bwd`` on every device's shard."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters.ad import zeros_like_aval
from jaxtyping import PyTree

from .batching import map_alike
from .context import Context, S, X, Y
from .implementation import Implementation, Residuals
from .mesh import is_explicit, is_manual, vary_alike
from .names import name_arrays
from .op_spec import BATCH, TOKENS, OpSpec
from .partitioning import per_shard

T = TypeVar("T")  # a pytree


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply(op: OpSpec[X, Y, S], implementation: Implementation[X, Y, S], ctx: Context[X, S], x: X) -> Y:
    return _fwd(op, implementation, dataclasses.replace(ctx, save_residuals=False), x)[0]


def _apply_fwd(
    op: OpSpec[X, Y, S], implementation: Implementation[X, Y, S], ctx: Context[X, S], x: X
) -> tuple[Y, tuple[X, Residuals]]:
    x = custom_vjp_primal_tree_values(x)
    outputs, residuals = _fwd(op, implementation, ctx, x)
    # named inside the rule, so that a policy can save them: see core/names.py
    names = op.output_names or (None,) * len(outputs)
    outputs = op.outputs._make(name_arrays(y, name) for y, name in zip(outputs, names))
    return outputs, (x, name_arrays(residuals, op.residual_name))


def _apply_bwd(
    op: OpSpec[X, Y, S],
    implementation: Implementation[X, Y, S],
    ctx: Context[X, S],
    saved: tuple[X, Residuals],
    dy: Y,
) -> tuple[X]:
    x, residuals = saved
    dy = vary_alike(_without_zeros(dy, implementation.unused_cotangents), x)
    dx = _bwd(op, implementation, ctx, x, residuals, dy)
    return (vary_alike(_summed(dx, x), x),)


_apply.defvjp(_apply_fwd, _apply_bwd, symbolic_zeros=True)
# in a `jax.shard_map` that is not jitted JAX has no rule for symbolic zeros
_apply_jitted = jax.jit(_apply, static_argnums=(0, 1, 2), inline=True)


def differentiable() -> Callable[..., PyTree]:
    """``(op, implementation, ctx, x) -> outputs``: an implementation with its gradient, for reverse mode."""
    return _apply_jitted if is_manual() else _apply


def _is_sharded(implementation: Implementation[X, Y, S], ctx: Context[X, S]) -> bool:
    """Whether an implementation gets one device's shard of the arrays, else XLA partitions it."""
    return implementation.opaque or is_explicit() or ctx.cp.size > 1


# jitted, as `_bwd`: a call outside `jax.jit` finds what an equal one compiled
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _fwd(
    op: OpSpec[X, Y, S], implementation: Implementation[X, Y, S], ctx: Context[X, S], x: X
) -> tuple[Y, Residuals]:
    """Outputs and residuals of the implementation."""
    rule = implementation.load()
    run: Callable[..., tuple[Y, Residuals]] = functools.partial(rule.fwd, ctx)
    if _is_sharded(implementation, ctx):
        residual_axes = rule.residual_axes(ctx) if ctx.save_residuals else {}
        results = op.output_axes(ctx), dict(residual_axes)
        run = per_shard(op, implementation.opaque, ctx, rule.fwd, (op.input_axes(x),), results)
        run = _once_differentiable(op, implementation, run)
    outputs, residuals = run(x)
    return map_alike(outputs, x), residuals


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _bwd(
    op: OpSpec[X, Y, S],
    implementation: Implementation[X, Y, S],
    ctx: Context[X, S],
    x: X,
    residuals: Residuals,
    dy: Y,
) -> X:
    """Gradients like ``x`` but None for integers; those of arrays without batch may have one in front, and
    where devices split the tokens, those of arrays without tokens an axis of devices before that.
    """
    rule = implementation.load()
    if not _is_sharded(implementation, ctx):
        return rule.bwd(ctx, x, residuals, dy)
    dy_axes = op.outputs._make(None if one is None else axes for axes, one in zip(op.output_axes(ctx), dy))
    operands = (op.input_axes(x), dy_axes, dict(rule.residual_axes(ctx)))
    dx_axes = jax.tree.map(
        lambda axes, array: _summed_axes(ctx, axes) if jnp.issubdtype(array.dtype, jnp.floating) else None,
        operands[0],
        x,
    )

    def on_shard(ctx: Context[X, S], x: X, dy: Y, residuals: Residuals) -> X:
        batch = next(
            array.shape[axes.split().index(BATCH)]
            for axes, array in zip(jax.tree.leaves(operands), jax.tree.leaves((x, dy, residuals)))
            if BATCH in axes.split()
        )
        dx = rule.bwd(ctx, x, residuals, dy)
        return jax.tree.map(lambda axes, g: _with_axes(ctx, g, axes.split(), batch), dx_axes, dx)

    if ctx.cp.axis is not None and is_manual():
        # inside `jax.shard_map` every device has its own cotangent of what is the same on all
        dy = jax.tree.map(
            lambda axes, g: g if TOKENS in axes.split() else jax.lax.psum(g, ctx.cp.axis), dy_axes, dy
        )
    run = per_shard(op, implementation.opaque, ctx, on_shard, operands, dx_axes)
    return _once_differentiable(op, implementation, run)(x, dy, residuals)


def _once_differentiable(
    op: OpSpec[X, Y, S], implementation: Implementation[X, Y, S], fn: Callable[..., T]
) -> Callable[..., T]:
    """``fn``; differentiating it raises a TypeError if the implementation is a kernel."""
    if not implementation.opaque:
        return fn
    kernel = jax.custom_jvp(fn)

    @kernel.defjvp
    def _(primals: PyTree, tangents: PyTree) -> NoReturn:
        plain = " or ".join(repr(one.name) for one in op.implementations if not one.opaque)
        raise TypeError(
            f"{op.name}: implementation={implementation.name!r} has first derivatives only; second "
            f"derivatives, by reverse mode or by forward mode over it, need implementation={plain}"
        )

    return kernel


def _summed_axes(ctx: Context[X, S], axes: str) -> str:
    """The axes of a gradient, with those in front that the op sums over."""
    names = axes.split()
    batch = [] if BATCH in names or "n" in names else [BATCH]
    return " ".join([*(["device"] if ctx.cp.size > 1 and TOKENS not in names else []), *batch, *names])


def _with_axes(ctx: Context[X, S], gradient: jax.Array, axes: list[str], batch: int) -> jax.Array:
    """A gradient with the axes that `_summed_axes` names."""
    has_device = ctx.cp.size > 1 and axes[0] == "device"
    if gradient.ndim < len(axes) - has_device:  # one for the whole batch here: the first entry's
        gradient = jnp.pad(gradient[None], ((0, batch - 1), *((0, 0),) * gradient.ndim))
    if has_device and ctx.cp.axis is None:  # made from whole sequences: the first device's is all of it
        return jnp.pad(gradient[None], ((0, ctx.cp.size - 1), *((0, 0),) * gradient.ndim))
    return gradient[None] if has_device else gradient


def _without_zeros(dy: Y, unused: tuple[str, ...]) -> Y:
    """The cotangents of outputs that nothing depends on: None where ``unused`` names them, else zeros."""

    def is_zero(one: object) -> bool:
        return isinstance(one, SymbolicZero)

    def array(one: PyTree) -> PyTree:
        return zeros_like_aval(one.aval) if is_zero(one) else one

    absent = [name for name, one in zip(dy._fields, dy) if name in unused and is_zero(one)]
    return jax.tree.map(array, dy._replace(**dict.fromkeys(absent)), is_leaf=is_zero)


def _summed(dx: X, x: X) -> X:
    """Gradients with the axes of ``x``: those by batch entry or device are summed. All of one shape are
    in one sum: one kernel, where each would take as long.
    """
    primals, tree = jax.tree.flatten(x)
    gradients: list[PyTree] = tree.flatten_up_to(dx)  # type: ignore[attr-defined]
    alike: dict[tuple[tuple[int, ...], jnp.dtype, int], list[int]] = {}
    for i, (g, primal) in enumerate(zip(gradients, primals)):
        if g is not None and g.ndim > primal.ndim:
            alike.setdefault((g.shape, g.dtype, primal.ndim), []).append(i)
    for (shape, _, ndim), places in alike.items():
        more = len(shape) - ndim
        sums = jnp.sum(jnp.stack([gradients[i] for i in places], more), tuple(range(more)))
        for i, one in zip(places, sums):
            gradients[i] = one.astype(primals[i].dtype)
    return jax.tree.unflatten(tree, gradients)
