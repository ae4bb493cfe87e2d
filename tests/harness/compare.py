"""What a call of an op is given and gives, and how two results are compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np


class Inputs(NamedTuple):
    """Arrays by name, cotangents by output, and the layout: segment_ids or cu_seqlens, or nothing."""

    arrays: dict[str, Any]
    cotangents: dict[str, Any]
    layout: dict[str, Any]


class Results(NamedTuple):
    """Outputs by name, gradients by array."""

    outputs: dict[str, Any]
    grads: dict[str, Any]


class Tolerances(NamedTuple):
    """Relative Frobenius errors allowed of a recurrence.

    Attributes:
        o: of the output.
        state: of the final state.
        grad: of every gradient but dw.
        dw: of dw.
        channel: of dw in each channel: a norm over all channels would hide what strong decays lose.
        rounded: whether the rounding of 16-bit results is subtracted, element by element, so that arithmetic
            in float32 is judged.
    """

    o: float = 3e-6
    state: float = 3e-6
    grad: float = 1e-5
    dw: float = 2e-5
    channel: float = 2e-5
    rounded: bool = True


EXACT = Tolerances()
DOUBLE = Tolerances(1e-12, 1e-12, 1e-12, 1e-12, 1e-12)
SMALLEST = 2.0**-104  # 1e-5 of it is 2^-121, and float32's normal numbers end at 2^-126


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def errors_of(got, want, axes: tuple[int, ...] | None = None, rounded: bool = True) -> np.ndarray:
    """Frobenius errors over ``axes`` (all) relative to the norm; where the norm is zero only zero is right.

    Results of 16 bits are forgiven their rounding, or at least their underflow. Arrays without a number
    above SMALLEST pass if the result has none either: float32 has too few digits there.
    """
    got, want = np.asarray(got), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    value = got.astype(np.float64)
    error = np.abs(value - want)
    if got.dtype.itemsize < 4:
        info = ml_dtypes.finfo(got.dtype)
        rounding = 0.5 * float(info.eps) * np.abs(want) * (1 + 1e-3) if rounded else 0
        error = np.maximum(error - rounding - 0.5 * float(info.smallest_subnormal), 0)
    top, most = (np.max(np.abs(x), axes, initial=0) for x in (want, value))
    error, norm = np.sqrt(np.sum(error**2, axes)), np.sqrt(np.sum(want**2, axes))
    relative = np.where(norm > 0, error / np.where(norm > 0, norm, 1), np.where(error == 0, 0, np.inf))
    if got.dtype.itemsize < 8:
        lost = (top > 0) & (top < SMALLEST) & (most < 2 * SMALLEST)
        relative = np.where(lost, 0, relative)
    return np.where(np.isnan(relative), np.inf, relative)


def error_of(got, want, axes: tuple[int, ...] | None = None, rounded: bool = True) -> float:
    return float(np.max(errors_of(got, want, axes, rounded), initial=0))


def largest_of(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    deviation = np.nan_to_num(np.max(np.abs(got - want), initial=0), nan=np.inf)
    return float(deviation / max(np.max(np.abs(want), initial=0), 1e-30))


def assert_close(name: str, got, want, tol: float) -> None:
    """Asserts that the Frobenius error is at most ``tol`` of the norm, see `error_of`."""
    error = error_of(got, want)
    assert error <= tol, f"{name}: relative error {error:.2e} > {tol:.0e}"


def assert_same_bits(one: Any, two: Any) -> None:
    """Structures, dtypes, shapes and bytes are equal."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, (path, a.dtype, b.dtype, a.shape, b.shape)
        assert a.tobytes() == b.tobytes(), path
