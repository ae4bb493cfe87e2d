"""Sizes and shapes for host code."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

import jax
from jax.typing import DTypeLike

Record = TypeVar("Record", bound=NamedTuple)


def next_power_of_two(n: int) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << (n - 1).bit_length()


def previous_power_of_two(n: int) -> int:
    """The largest power of two up to ``n``; 1 below 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def tile(n: int) -> int:
    """``n`` padded to what `tl.dot` takes: a power of two from 16 on."""
    return max(16, next_power_of_two(n))


def shaped(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """A `jax.ShapeDtypeStruct`, typed as the array that takes its place in a call's outputs."""
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype))


def like(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """`shaped` of ``x``, with its dtype unless another is given."""
    return shaped(x.shape, dtype or x.dtype)


def without(x: Record, *names: str) -> Record:
    """``x`` without the named fields: kernels have no parameters for them."""
    return x._replace(**dict.fromkeys(names))


def like_fields(x: Record, *names: str) -> Record:
    """The record of `like` of the named fields; None for the other fields and for what ``x`` lacks."""
    return jax.tree.map(like, without(x, *(name for name in x._fields if name not in names)))
