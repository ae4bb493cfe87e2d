"""Which implementation runs a call: the one readable place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# First the preferred one. "chunk" forms are parallel inside a chunk; "recurrent" forms go token by token.
PREFERENCE = {
    "chunk": ("xla", "reference"),
    "recurrent": ("reference", "xla"),
}


def choose(op: str, form: str, implementation: str | None, table: Mapping[str, Any]) -> str:
    """The key of ``table`` that serves this call.

    Raises:
        ValueError: ``implementation`` is no implementation of this op.
    """
    if implementation is None:
        return next(name for name in PREFERENCE[form] if name in table)
    if implementation not in table:
        raise ValueError(f"{op}: implementation must be one of {sorted(table)} or None, got {implementation!r}")
    return implementation
