"""Types of kernel code. Triton's own values are untyped."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any  # in host code an array, its shape, an int or None; in a kernel a pointer or a tile
