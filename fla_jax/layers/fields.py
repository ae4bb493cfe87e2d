"""Checks of the fields that configurations and layers share, made when the object is created."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..core.arguments import as_integer, check_chunk_size
from ..ops import OPS
from .fp8 import check_fp8

DTYPES = ("float16", "bfloat16", "float32", "float64")
_SIZES = ("vocab_size", "hidden_size", "num_layers", "head_dim")
_MAX_HEAD_DIM = 256  # of the ops


def implementations() -> tuple[str, ...]:
    """Names that ``implementation`` may have: those in the lists of the ops, which are open."""
    ops = [op for name, op in OPS.items() if name.startswith(("chunk_", "fused_recurrent_"))]
    return tuple(dict.fromkeys(one.name for op in ops for one in op.implementations))


def check_fields(**values: Any) -> None:
    """Raises ValueError or TypeError, naming the field, unless the known ones among ``values`` are valid."""
    for name, value in values.items():
        optional = name.endswith("_low_rank_dim") or name == "intermediate_size"
        if name in _SIZES or (optional and value is not None):
            check_size(name, value)
        elif name in ("dtype", "param_dtype"):
            check_dtype(name, value)
        elif name in ("logical_axes", "norm_first", "tie_embeddings", "fp8", "reshard_after_forward"):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {value!r}")
        elif name == "rate_scale" and (
            not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 2
        ):
            raise ValueError(f"rate_scale must be a number from 0 to 2, got {value!r}")
    if "layer_index" in values:
        check_layer_index(values["layer_index"], values["num_layers"])
    if values.get("fp8") and "dtype" in values:
        check_fp8(values["dtype"])
    if "head_dim" in values:
        check_heads(values["hidden_size"], values["head_dim"])
        if check_chunk_size(values["chunk_size"]) is not None:
            check_size("chunk_size", values["chunk_size"])
        implementation, known = values["implementation"], implementations()
        if implementation is not None and implementation not in known:
            raise ValueError(
                f"implementation must be one of {', '.join(known)} or None, got {implementation!r}"
            )


def check_layer_index(value: object, num_layers: int) -> None:
    """Raises ValueError unless ``value`` is the number of a layer. Arrays, which may be traced, pass."""
    number = as_integer(value)
    if not isinstance(value, jax.Array) and (number is None or not 0 <= number < num_layers):
        wanted = f"an integer from 0 to num_layers - 1 = {num_layers - 1}"
        raise ValueError(f"layer_index must be {wanted}, got {value!r}")


def check_size(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a positive int."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_heads(hidden_size: int, head_dim: int) -> None:
    """Raises ValueError unless ``hidden_size`` is a multiple of a ``head_dim`` that the ops take."""
    if head_dim > _MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {_MAX_HEAD_DIM}, got {head_dim}")
    if hidden_size % head_dim:
        got = f"hidden_size = {hidden_size}, head_dim = {head_dim}"
        raise ValueError(f"hidden_size must be a multiple of head_dim, got {got}")


def check_dtype(name: str, value: Any) -> jnp.dtype:
    """The dtype named by ``value``.

    Raises:
        TypeError: it is none of float16, bfloat16, float32 and float64, or float64 without
            ``jax_enable_x64``.
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
