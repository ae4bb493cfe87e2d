"""Checks of plain Python arguments: every error names the argument, what came and what was wanted."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np


def as_integer(value: Any) -> int | None:
    """A Python, NumPy or JAX integer as an int; None for all else, booleans and whole floats among it."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_integers(values: Any) -> tuple[int, ...] | None:
    """Any sequence or array of integers as a tuple; None for all else, text and single integers among it."""
    try:
        numbers = tuple(as_integer(value) for value in values)
    except TypeError:  # not iterable
        return None
    known = tuple(number for number in numbers if number is not None)
    return None if isinstance(values, bytes) or len(known) < len(numbers) else known


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is no integer, or not from ``low`` to ``high``.
    """
    number = as_integer(value)
    if number is None or number < low or (high is not None and number > high):
        span = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {span}, got {shown(value)}")
    return number


def check_chunk_size(value: object) -> int | None:
    """Tokens per chunk as the ops take them.

    Raises:
        ValueError: it is neither None nor a power of two from 1 to 256.
    """
    number = as_integer(value)
    if value is not None and number not in [1 << i for i in range(9)]:
        raise ValueError(f"chunk_size must be a power of two from 1 to 256 or None, got {shown(value)}")
    return number


def check_number(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """``value`` as a finite float: any real scalar of Python, NumPy or JAX. No boolean and no text.

    Raises:
        ValueError: it is no finite number, or not from ``low`` to ``high``.
    """
    is_number = hasattr(value, "__float__") and np.ndim(value) == 0 and np.asarray(value).dtype != bool
    try:
        number = float(value) if is_number else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    if not low <= number <= high:
        span = f">= {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {span}, got {shown(value)}")
    return number


def check_share(name: str, value: object) -> float:
    """``value`` as a float from 0 to below 1, see `check_number`."""
    share = check_number(name, value, 0)
    if share >= 1:
        raise ValueError(f"{name} must be below 1, got {share:g}")
    return share


def shown(value: object) -> str:
    """``value`` for an error message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
