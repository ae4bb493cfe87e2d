"""RWKV-6's log decays, saved once: for the recurrence and for their own gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..array_checks import check_shape, floating

MOST = 20.0  # exp(-exp(20)) is 0 already; above 88 exp overflows and the gradient would be inf * 0


def rwkv6_decay(
    x: Float[Array, "*B C"], base: Float[Array, " C"], dtype: DTypeLike | None = None
) -> Float[Array, "*B C"]:
    """``w = -exp(min(base + x, 20))``: natural logarithms of RWKV-6's decays.

    The gradient of the sum is ``w`` times that of w, in the dtype of x, with w as rounded to ``dtype``.

    Args:
        x: [..., C], the tokens' part; float32, because its last digits decide on those of w.
        base: [C], the parameter.
        dtype: of the result; None for that of x. float16 lacks the range.

    Returns:
        w [..., C], not above 0.

    Raises:
        ValueError: ``base`` does not fit ``x``.
        TypeError: an array or ``dtype`` is not floating-point.

    Source: Peng et al. 2024; RWKV-LM ``RWKV-v5/src/model.py``, which has no minimum.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.ops.layer import rwkv6_decay
        >>> rwkv6_decay(jnp.array([[0.0, 30.0]]), jnp.array([0.0, 0.0])).round().tolist()
        [[-1.0, -485165184.0]]
    """
    x, base = floating("x", x), floating("base", base)
    check_shape("base", base, x.shape[-1:], "[C]")
    try:
        made = jnp.dtype(x.dtype if dtype is None else dtype)
    except TypeError:
        made = None
    if made is None or not jnp.issubdtype(made, jnp.floating):
        raise TypeError(f"dtype must be floating-point, got {made or dtype}")
    return _differentiable(base.astype(x.dtype) + x, made, x.dtype)


def _decay(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (-jnp.exp(jnp.minimum(x, MOST))).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _differentiable(x: jax.Array, dtype: jnp.dtype, wide: jnp.dtype) -> jax.Array:
    return _decay(x, dtype)


# What the rule calls is plain: derivatives of gradients, in either mode, go through it.
def _forward(x: jax.Array, dtype: jnp.dtype, wide: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    w = _decay(x, dtype)
    return w, w


def _backward(dtype: jnp.dtype, wide: jnp.dtype, w: jax.Array, dw: jax.Array) -> tuple[jax.Array]:
    least = _decay(jnp.asarray(MOST, wide), dtype)
    return (jnp.where(w > least, dw.astype(wide) * w.astype(wide), 0),)


_differentiable.defvjp(_forward, _backward)
