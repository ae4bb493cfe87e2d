"""Which cases of a sweep the fast tier runs: the rest are more of the same property."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from .cases import OPS

SLOW, ONE_PYTHON = pytest.mark.slow, pytest.mark.one_python


def first(values: Iterable[Any], fast: int = 1, later: tuple[Any, ...] = (SLOW,)) -> list[Any]:
    """Values for parametrize, all but the first ``fast`` of them marked."""
    values = list(values)
    return values[:fast] + [mark(value, *later) for value in values[fast:]]


def mark(value: Any, *marks: Any, id: str | None = None) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=marks, id=id)


each_op = pytest.mark.parametrize("op", OPS)
each_implementation = pytest.mark.parametrize("implementation", first(["xla", "reference"]))  # of plain JAX
