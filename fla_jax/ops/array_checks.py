"""Checks of one array: every error names the argument, what came and what was wanted."""

from __future__ import annotations

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))


def _is_array(x: object) -> TypeGuard[jax.Array | np.ndarray]:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def floating(name: str, x: object) -> jax.Array:
    """``x`` as a JAX array.

    Raises:
        TypeError: it is no array of float16, bfloat16, float32 or float64.
    """
    if not _is_array(x):
        raise TypeError(f"{name} must be a floating-point array, got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    return jnp.asarray(x)


def integers(name: str, x: object) -> jax.Array:
    """``x`` as a JAX array; lists and tuples are taken too.

    Raises:
        TypeError: it is no array of integers.
        ValueError: JAX would cut off what a number has more than 32 bits.
    """
    if isinstance(x, list | tuple):
        try:
            x = np.asarray(x)
        except ValueError:  # a ragged one
            raise TypeError(
                f"{name} must be an integer array (int32), got lists of different lengths"
            ) from None
    if not _is_array(x) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be an integer array (int32), got {getattr(x, 'dtype', type(x).__name__)}"
        )
    made = jnp.asarray(x)
    if isinstance(x, np.ndarray) and made.dtype.itemsize < x.dtype.itemsize and x.size:
        least, most = jnp.iinfo(made.dtype).min, jnp.iinfo(made.dtype).max
        if x.min() < least or x.max() > most:
            raise ValueError(
                f"{name} must be from {least} to {most} ({made.dtype}), got {x.min()} to {x.max()}; "
                "jax_enable_x64 takes larger ones"
            )
    return made


def check_rank(name: str, x: jax.Array, axes: str) -> None:
    """Raises ValueError unless ``x`` has as many axes as ``axes`` ("[B, T, H, N]") names."""
    if len(x.shape) != len(axes.split(",")):
        raise ValueError(f"{name} must have shape {axes}, got {list(x.shape)}")


def check_shape(name: str, x: jax.Array, want: tuple[int, ...], axes: str, hint: str = "") -> None:
    """Raises ValueError unless ``x`` has the shape ``want``, whose axes are called ``axes``."""
    if tuple(x.shape) != want:
        raise ValueError(f"{name} must have shape {axes} = {list(want)}, got {list(x.shape)}{hint}")
