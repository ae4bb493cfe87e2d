"""Selects a row of a variant table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar


class Row(Protocol):
    """A variant: ``when(key)`` says whether it serves a call."""

    @property
    def when(self) -> Callable[..., bool]:
        """Predicate on the facts of a call."""


R = TypeVar("R", bound=Row)


def select(variants: Sequence[R], key: Hashable) -> R:
    """The first variant that serves the call; the last one of a table serves all."""
    return next(variant for variant in variants if variant.when(key))
