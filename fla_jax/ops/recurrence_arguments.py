"""Argument checks of the recurrences: every error names the argument, what came and what was wanted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import check_chunk_size
from ..core.context import RecurrenceConfig
from ..core.varlen import zeros
from .array_checks import check_shape, floating, integers


def _check_cu_seqlens(cu: jax.Array, B: int, T: int) -> None:
    if cu.ndim != 1 or cu.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1, got {list(cu.shape)}")
    if B != 1:
        raise ValueError(f"cu_seqlens packs all sequences into one row: r must have B = 1, got B = {B}")
    if isinstance(cu, jax.core.Tracer):
        return  # the values are known only at run time: the checked mode looks at them
    values = np.asarray(cu).astype(np.int64)
    if values[0] != 0 or values[-1] != T or (np.diff(values) < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {T} without falling, got "
            f"{values.tolist()[:8]}{' ...' if values.size > 8 else ''}"
        )


def _static_float(name: str, x: Any) -> float:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a Python number, known when the function is traced, got a traced value; "
            "multiply o by it instead"
        )
    if isinstance(x, str | bytes | bool | np.bool_):  # which float() would take
        raise TypeError(f"{name} must be a Python number, got {type(x).__name__} {x!r}")
    try:
        return float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a Python number, got {type(x).__name__}") from None


def check(
    tokens: Mapping[str, Any],
    *,
    u: Any = ...,
    initial_state: Any,
    segment_ids: Any,
    cu_seqlens: Any,
    scale: Any,
    chunk_size: Any = None,
    lower_bound: Any = None,
    warn_layout: bool,
) -> tuple[dict[str, Any], RecurrenceConfig]:
    """Checks the arguments of one call of a recurrence.

    Args:
        tokens: token arrays by name, ``r`` and ``v`` among them.
        u: RWKV-6's bonus; ... for an op that has none.
        initial_state: array or None, as the other arguments of the public function.
        segment_ids: array or None.
        cu_seqlens: array or None.
        scale: a number.
        chunk_size: a power of two or None.
        lower_bound: a number or None.
        warn_layout: whether to warn where axes seem to be swapped.

    Returns:
        All arrays by name, the initial state made where none was given and in the compute dtype, and the
        settings.
    """
    arrays = {name: floating(name, x) for name, x in tokens.items()}
    B, T, H, K, V = _sizes(arrays)
    if u is not ...:
        arrays["u"] = u = floating("u", u)
        hint = "; r, k, v, w seem to be [B, H, T, D]: swap their axes 1 and 2"
        check_shape("u", u, (H, K), "[H, K]", hint if tuple(u.shape) == (T, K) else "")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError(
            "segment_ids and cu_seqlens are two ways to say the same thing: give one of them, got both"
        )
    rows = B
    if segment_ids is not None:
        segment_ids = integers("segment_ids", segment_ids)
        check_shape("segment_ids", segment_ids, (B, T), "[B, T]")
    if cu_seqlens is not None:
        cu_seqlens = integers("cu_seqlens", cu_seqlens)
        _check_cu_seqlens(cu_seqlens, B, T)
        rows = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = floating("initial_state", initial_state)
        hint = ""
        if tuple(initial_state.shape) == (rows, T, K, V):
            hint = "; r, k, v, ... seem to be [B, H, T, D]: swap their axes 1 and 2"
        elif K != V and tuple(initial_state.shape) == (rows, H, V, K):
            hint = "; it seems to be [B, H, V, K] (RWKV-LM's order): swap its last two axes"
        axes = "[B, H, K, V]" if cu_seqlens is None else "[N, H, K, V]"
        check_shape("initial_state", initial_state, (rows, H, K, V), axes, hint)
    elif warn_layout and u is ... and _fewer(1, T) and _fewer(T, H):
        warnings.warn(
            f"r has T = {T} < H = {H}: if it is [B, H, T, D], swap axes 1 and 2 (the layout is [B, T, H, D])",
            stacklevel=4,
        )
    settings = _settings(scale, chunk_size, lower_bound, [*arrays.values(), initial_state])
    if initial_state is not None:
        state = initial_state.astype(settings.compute)
    elif T == 0 or B == 0:
        state = jnp.zeros((rows, H, K, V), settings.compute)
    else:  # sharded like the rows and heads of r and v
        r, v = arrays["r"], arrays["v"]
        first = r[:, 0, :, :, None] * v[:, 0, :, None, :].astype(r.dtype)
        state = jnp.broadcast_to(zeros(first, first, settings.compute), (rows, H, K, V))
    return arrays | dict(initial_state=state, segment_ids=segment_ids, cu_seqlens=cu_seqlens), settings


def _sizes(arrays: Mapping[str, jax.Array]) -> tuple[Any, Any, int, int, int]:
    """B, T, H, K, V of token arrays that fit each other; B and T may be symbolic."""
    r, v = arrays["r"], arrays["v"]
    if r.ndim != 4:
        raise ValueError(f"r must have shape [B, T, H, K], got {list(r.shape)}")
    B, T, H, K = r.shape
    if v.ndim != 4:
        raise ValueError(f"v must have shape [B, T, H, V] = [{B}, {T}, {H}, V], got {list(v.shape)}")
    V = v.shape[-1]
    for name, size in (("H", H), ("K", K), ("V", V)):
        if not isinstance(size, int):
            owner = "v" if name == "V" else "r"
            raise ValueError(f"{owner} has a symbolic {name} = {size}: only B, the rows, may be symbolic")
    if not isinstance(T, int):
        raise ValueError(
            f"r has a symbolic T = {T}: the number of tokens decides how chunks are cut and must be known; "
            "only B, the rows, may be symbolic. Export one function for each T, or pad to the longest"
        )
    for name, x in arrays.items():
        want, axes = ((B, T, H, V), "[B, T, H, V]") if name == "v" else ((B, T, H, K), "[B, T, H, K]")
        swapped = x.ndim == 4 and tuple(x.shape) == (B, H, T, want[-1])
        check_shape(name, x, want, axes, "; is it [B, H, T, D]? Swap axes 1 and 2" if swapped else "")
    for name, size in (("K", K), ("V", V)):
        if not 1 <= size <= 256:
            owner = "r" if name == "K" else "v"
            raise ValueError(f"{owner} has {name} = {size}; head sizes from 1 to 256 are supported")
    return B, T, H, K, V


def _fewer(x: Any, y: Any) -> bool:
    return isinstance(x, int) and isinstance(y, int) and x < y


def _settings(scale: Any, chunk_size: Any, lower_bound: Any, arrays: list[Any]) -> RecurrenceConfig:
    scale = _static_float("scale", scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    if lower_bound is not None:
        lower_bound = _static_float("lower_bound", lower_bound)
        if not (math.isfinite(lower_bound) and lower_bound <= 0):
            raise ValueError(
                f"lower_bound must be a finite number <= 0 (a bound on the log decay w), got {lower_bound}"
            )
    double = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    name = "float64" if double else "float32"
    return RecurrenceConfig(scale, check_chunk_size(chunk_size), lower_bound, name)
