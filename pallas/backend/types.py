"""Types of kernel code. Triton's own values are untyped."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax

Tensor: TypeAlias = Any  # in host code an array, its shape, an int or None; in a kernel a pointer or a tile
# a kernel's parameter: named tuples of arrays, ints and None
Group: TypeAlias = "tuple[Group, ...] | jax.Array | jax.ShapeDtypeStruct | int | None"
# the same with Triton's pointer types (``"*bf16"``) for arrays
Signature: TypeAlias = "tuple[Signature, ...] | str | int | None"


class Kernel(Protocol):
    """A `triton.jit` function, to compile or to interpret."""

    __name__: str
    arg_names: list[str]
    cache_key: str

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """Runs it."""
