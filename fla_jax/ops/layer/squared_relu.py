"""The activation of both feed-forwards, ``relu(h)^2``, which saves only its result for the gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.names import name_dense


@jax.custom_vjp
def squared_relu(h: jax.Array) -> jax.Array:
    """``relu(h)^2`` of a floating array of any shape, in its dtype (So et al. 2021, Primer).

    Saves its result instead of h for the gradient (``relu(h)`` is the square root), except in float16, where
    small squares lose digits: one array less in memory. It can be differentiated again.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import squared_relu
        >>> jax.grad(lambda h: squared_relu(h).sum())(jnp.array([-1.0, 0.5, 2.0])).tolist()
        [0.0, 1.0, 4.0]
    """
    return _square(h)


def _square(h: jax.Array) -> jax.Array:
    # no maximum with 0: XLA would compute it in the product that makes h, and would copy the weights of that
    # product out of the stack of all layers first
    return jnp.where(h <= 0, 0, h * h)


# What the rule calls is not `squared_relu` itself: derivatives of gradients, in either mode, go through it.
def _forward(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _square(h)
    if h.dtype == jnp.float16:
        return y, h
    y = name_dense(y)
    return y, y


@jax.custom_jvp
def _root(y: jax.Array) -> jax.Array:
    """The square root, whose derivative at 0 is 0: that of ``relu(h)`` in h, where h gives 0."""
    return jnp.sqrt(y)


@_root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (y,), (dy,) = primals, tangents
    root = _root(y)
    return root, jnp.where(y > 0, dy / (2 * jnp.where(y > 0, root, 1)), 0)


def _backward(residuals: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    wide = residuals.astype(jnp.promote_types(residuals.dtype, jnp.float32))
    root = jax.nn.relu(wide) if residuals.dtype == jnp.float16 else _root(wide)
    return ((2 * root * dy.astype(wide.dtype)).astype(dy.dtype),)


squared_relu.defvjp(_forward, _backward)
