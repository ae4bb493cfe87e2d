"""Common to the public functions of both recurrences: checks of arguments, axes, options.

Every error names the argument, what came and what was wanted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core.arguments import check_chunk_size
from ..core.context import Context, X
from ..core.implementation import Implementation
from ..core.mesh import is_explicit, shard_like, vary_alike
from ..core.names import FINAL, OUT, STATES
from ..core.op import Op
from ..core.types import Outputs, Recurrence, RecurrenceConfig
from ..core.varlen import zeros
from .array_checks import check_shape, floating, integers

AXES = {name: "b t h k" for name in "rwkab"} | {
    "v": "b t h v",
    "u": "h k",
    "initial_state": "n h k v",
    "segment_ids": "b t",
    "cu_seqlens": "m",
    "o": "b t h v",
    "final_state": "n h k v",
}

Tokens = Float[Array, "B T H K"]  # for the overloads of the public functions
Values = Float[Array, "B T H V"]
State = Float[Array, "N H K V"]
Bonus = Float[Array, "H K"]
Precision = jax.lax.Precision | str | None


class _Options(TypedDict, total=False):
    scale: float
    initial_state: State | None
    segment_ids: Int[Array, "B T"] | None
    cu_seqlens: Int[Array, " N+1"] | None
    implementation: str | None
    sequence_axis: str | None


class _ChunkOptions(_Options, total=False):
    chunk_size: int | None
    lower_bound: float | None
    precision: Precision


class Options(_Options, total=False):
    """Keyword arguments of the recurrent forms, for type checkers: see `fla_jax.ops.chunk_rwkv7`."""

    output_final_state: bool


class OptionsWithState(_Options):
    """The same of calls that return a state."""

    output_final_state: Literal[True]


class ChunkOptions(_ChunkOptions, total=False):
    """Keyword arguments of the chunked forms."""

    output_final_state: bool


class ChunkOptionsWithState(_ChunkOptions):
    """The same of calls that return a state."""

    output_final_state: Literal[True]


def recurrence_op(
    name: str,
    inputs: type[Recurrence],
    implementations: list[Implementation[Recurrence, Outputs, RecurrenceConfig]],
    check: Callable[[Context[Recurrence, RecurrenceConfig], Recurrence, Outputs], None],
) -> Op[Recurrence, Outputs, RecurrenceConfig]:
    """A recurrence; ``implementations`` in order of preference, as measured (docs/performance.md)."""
    return Op(
        name,
        inputs,
        Outputs,
        AXES,
        implementations,
        output_names=(OUT, FINAL),
        residual_name=STATES,
        check=check,
        empty=_without_tokens,
    )


def _without_tokens(x: Recurrence) -> Outputs:
    """The outputs of a call with T = 0 or B = 0."""
    return Outputs(jnp.zeros_like(x.v), x.initial_state)


def checked_inputs(
    inputs: type[X],
    arrays: Mapping[str, object],
    initial_state: object,
    segment_ids: object,
    cu_seqlens: object,
    scale: object,
    chunk_size: object = None,
    lower_bound: object = None,
    allow_tf32: bool = False,
    *,
    warn_layout: bool = False,
) -> tuple[X, RecurrenceConfig]:
    """The arguments of one call, checked: arrays as ``inputs``, and the settings.

    The initial state is zeros where none was given, and in the compute dtype. With ``warn_layout`` a warning
    says where axes seem to be swapped.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    x = {name: floating(name, array) for name, array in arrays.items() if name != "u"}
    B, T, H, K, V = _sizes(x)
    if "u" in arrays:
        x["u"] = u = floating("u", arrays["u"])
        hint = "; r, k, v, w seem to be [B, H, T, D]: swap their axes 1 and 2"
        check_shape("u", u, (H, K), "[H, K]", hint if tuple(u.shape) == (T, K) else "")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError(
            "segment_ids and cu_seqlens are two ways to say the same thing: give one of them, got both"
        )
    N, axes = B, "[B, H, K, V]"
    if segment_ids is not None:
        x["segment_ids"] = integers("segment_ids", segment_ids)
        check_shape("segment_ids", x["segment_ids"], (B, T), "[B, T]")
    if cu_seqlens is not None:
        x["cu_seqlens"] = cu = integers("cu_seqlens", cu_seqlens)
        _check_cu_seqlens(cu, B, T)
        N, axes = cu.shape[0] - 1, "[N, H, K, V]"
    h0 = None
    if initial_state is not None:
        h0 = floating("initial_state", initial_state)
        hint = ""
        if tuple(h0.shape) == (N, T, K, V):
            hint = "; r, k, v, ... seem to be [B, H, T, D]: swap their axes 1 and 2"
        elif K != V and tuple(h0.shape) == (N, H, V, K):
            hint = "; it seems to be [B, H, V, K] (RWKV-LM's order): swap its last two axes"
        check_shape("initial_state", h0, (N, H, K, V), axes, hint)
    elif warn_layout and _is_less(1, T) and _is_less(T, H):
        warnings.warn(
            f"r has T = {T} < H = {H}: if it is [B, H, T, D], swap axes 1 and 2 (the layout is [B, T, H, D])",
            stacklevel=3,
        )
    floats = [*x.values(), *([] if h0 is None else [h0])]
    is_double = any(array.dtype == jnp.float64 for array in floats)
    config = RecurrenceConfig(
        _checked_scale(scale),
        check_chunk_size(chunk_size),
        _checked_bound(lower_bound),
        "float64" if is_double else "float32",
        allow_tf32,
    )
    if h0 is not None:
        h0 = h0.astype(config.compute)
    elif T == 0 or B == 0 or is_explicit():
        h0, batch = jnp.zeros((N, H, K, V), config.compute), None if "cu_seqlens" in x else 0
        h0 = vary_alike(shard_like(h0, x["r"], batch, 2, None, None), x["r"], x["v"])
    else:  # sharded like the batch and the heads of r and v
        r, v = x["r"], x["v"]
        first = r[:, 0, :, :, None] * v[:, 0, :, None, :].astype(r.dtype)
        h0 = jnp.broadcast_to(zeros(first, first, config.compute), (N, H, K, V))
    x["initial_state"] = h0
    return inputs._make(x.get(name) for name in inputs._fields), config


def allows_tf32(precision: object) -> bool:
    """Whether ``precision``, or JAX's default where it is None, lets float32 products round to TF32.

    Raises:
        ValueError: it is no precision.
    """
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    chosen = default if precision is None else precision
    if chosen is None:
        return False
    if isinstance(chosen, str) and chosen in jax.lax.DotAlgorithmPreset.__members__:  # so may JAX's default
        return chosen == jax.lax.DotAlgorithmPreset.TF32_TF32_F32.name
    try:
        return jax.lax.Precision(chosen) is not jax.lax.Precision.HIGHEST
    except (TypeError, ValueError):
        wanted = ", ".join(one.name.lower() for one in jax.lax.Precision)
        raise ValueError(
            f"precision must be None or a jax.lax.Precision or its name ({wanted}, tensorfloat32, float32), "
            f"got {precision!r}"
        ) from None


def _sizes(arrays: Mapping[str, jax.Array]) -> tuple[int, int, int, int, int]:
    """B, T, H, K, V of token arrays that fit each other; B may be symbolic."""
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
            raise ValueError(f"{owner} has a symbolic {name} = {size}: only B, the batch, may be symbolic")
    if not isinstance(T, int):
        raise ValueError(
            f"r has a symbolic T = {T}: the number of tokens decides how chunks are cut and must be known; "
            "only B, the batch, may be symbolic. Export one function for each T, or pad to the longest"
        )
    for name, x in arrays.items():
        want, axes = ((B, T, H, V), "[B, T, H, V]") if name == "v" else ((B, T, H, K), "[B, T, H, K]")
        is_swapped = x.ndim == 4 and tuple(x.shape) == (B, H, T, want[-1])
        check_shape(name, x, want, axes, "; is it [B, H, T, D]? Swap axes 1 and 2" if is_swapped else "")
    for name, size in (("K", K), ("V", V)):
        if not 1 <= size <= 256:
            owner = "r" if name == "K" else "v"
            raise ValueError(f"{owner} has {name} = {size}; head sizes from 1 to 256 are supported")
    return B, T, H, K, V


def _is_less(x: object, y: object) -> bool:
    return isinstance(x, int) and isinstance(y, int) and x < y


def _check_cu_seqlens(cu: jax.Array, B: int, T: int) -> None:
    if not all(isinstance(size, int) for size in cu.shape):
        raise ValueError(f"cu_seqlens must have a known shape, got {list(cu.shape)}: only B may be symbolic")
    if cu.ndim != 1 or cu.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1, got {list(cu.shape)}")
    if B != 1:
        raise ValueError(
            f"cu_seqlens packs all sequences in one batch element: r must have B = 1, got B = {B}"
        )
    if isinstance(cu, jax.core.Tracer):
        return  # the values are known only at run time: the checked mode looks at them
    values = np.asarray(cu).astype(np.int64)
    if values[0] != 0 or values[-1] != T or (np.diff(values) < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {T} without falling, got "
            f"{values.tolist()[:8]}{' ...' if values.size > 8 else ''}"
        )


def _checked_scale(scale: object) -> float:
    number = _static_float("scale", scale, "; multiply o by it instead")
    if not math.isfinite(number):
        raise ValueError(f"scale must be a finite number, got {number}")
    return number


def _checked_bound(lower_bound: object) -> float | None:
    if lower_bound is None:
        return None
    number = _static_float("lower_bound", lower_bound)
    if not (math.isfinite(number) and number <= 0):
        raise ValueError(
            f"lower_bound must be a finite number <= 0 (a bound on the log decay w), got {number}"
        )
    return number


def _static_float(name: str, x: object, if_traced: str = "") -> float:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a Python number, known when the function is traced, got a traced value"
            f"{if_traced}"
        )
    if isinstance(x, str | bytes | bool | np.bool_):  # which float() would take
        raise TypeError(f"{name} must be a Python number, got {type(x).__name__} {x!r}")
    try:
        return float(x)  # type: ignore[arg-type]
    except OverflowError:  # an integer of more than 308 digits
        return math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a Python number, got {type(x).__name__}") from None
