"""Checks of fields that configurations and layers share: errors when an object is made, not when it runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..core.arguments import check_chunk_size
from ..ops.rwkv6 import api as rwkv6
from ..ops.rwkv7 import api as rwkv7

DTYPES = ("float16", "bfloat16", "float32", "float64")
_SIZES = ("vocab_size", "hidden_size", "num_layers", "head_dim")
_MOST_CHANNELS = 256  # per head, in the ops


def implementations() -> tuple[str, ...]:
    """Names that ``implementation`` may have: those in the ops' lists, which are open."""
    ops = (rwkv6.CHUNK, rwkv6.RECURRENT, rwkv7.CHUNK, rwkv7.RECURRENT)
    return tuple(dict.fromkeys(one.name for op in ops for one in op.implementations))


def check_fields(**values: Any) -> None:
    """Checks fields by their names, each as its docstring has it; names that are not known pass.

    Raises:
        ValueError, TypeError: a field does not fit; the message names it.
    """
    for name, value in values.items():
        optional = name.endswith("_low_rank_dim") or name == "intermediate_size"
        if name in _SIZES or (optional and value is not None):
            check_size(name, value)
        elif name in ("dtype", "param_dtype"):
            check_dtype(name, value)
        elif name == "logical_axes":
            check_flag(name, value)
        elif name == "rate_scale":
            check_rate_scale(value)
    if "head_dim" in values:
        check_heads(values["hidden_size"], values["head_dim"])
        if check_chunk_size(values["chunk_size"]) is not None:
            check_size("chunk_size", values["chunk_size"])
        check_implementation(values["implementation"])


def check_size(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is a positive int."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_heads(hidden_size: int, head_dim: int) -> None:
    """Raises ValueError unless the channels make whole heads of a size that the ops take."""
    if head_dim > _MOST_CHANNELS:
        raise ValueError(f"head_dim must be at most {_MOST_CHANNELS}, got {head_dim}")
    if hidden_size % head_dim:
        got = f"hidden_size = {hidden_size}, head_dim = {head_dim}"
        raise ValueError(f"hidden_size must be a multiple of head_dim, got {got}")


def check_rate_scale(value: Any) -> None:
    """Raises ValueError unless ``value`` is a number from 0 to 2."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 2:
        raise ValueError(f"rate_scale must be a number from 0 to 2, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_implementation(value: Any) -> None:
    """Raises ValueError unless ``value`` is None or a name of an implementation; it need not run here."""
    if value is not None and value not in implementations():
        known = ", ".join(implementations())
        raise ValueError(f"implementation must be one of {known} or None, got {value!r}")


def check_dtype(name: str, value: Any) -> jnp.dtype:
    """The dtype that ``value`` means.

    Raises:
        TypeError: it is none of float16, bfloat16, float32 and float64, or it is float64 without
            ``jax_enable_x64``, where JAX would compute in float32.
    """
    try:
        dtype = None if value is None else jnp.dtype(value)  # NumPy takes None for float64
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in DTYPES:
        got = repr(value) if dtype is None else dtype.name
        raise TypeError(f"{name} must be a floating-point dtype, one of {', '.join(DTYPES)}, got {got}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(f"{name} is {dtype}, which JAX has only with jax_enable_x64 set")
    return dtype
