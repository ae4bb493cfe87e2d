"""Sizes and shapes for host code."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Record = TypeVar("Record", bound=Any)  # a named tuple


def tile(n: int) -> int:
    """``n`` padded to what `tl.dot` takes: a power of two from 16 on."""
    return max(16, 1 << (n - 1).bit_length())


def shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    """A `jax.ShapeDtypeStruct`, typed as the array that takes its place in a call's outputs."""
    return jax.ShapeDtypeStruct(shape, dtype)


def like(x: jax.Array, dtype: Any = None) -> Any:
    """`shaped` of ``x``, with its dtype unless another is given."""
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def like_fields(x: Record, *names: str) -> Record:
    """The record of `like` of the named fields; None for the other fields and for what ``x`` lacks."""
    fields = {name: array if name in names else None for name, array in x._asdict().items()}
    return jax.tree.map(like, type(x)(**fields))
