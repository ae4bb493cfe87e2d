"""Runs Triton kernels on the host, in Triton's interpreter, inside `jax.jit`: how their numerics are checked
without a GPU.

Set ``TRITON_INTERPRET=1`` before Triton is imported. Slow; the interpreter's `tl.dot` is wrong for bfloat16,
so use float32 inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# the interpreter patches triton.language while it runs; several devices call at once
_LOCK = threading.Lock()
_TRITON_NAMES = {
    np.dtype(bool): "i1",
    np.dtype(np.float32): "fp32",
    np.dtype(np.float16): "fp16",
    np.dtype(np.float64): "fp64",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.int8): "i8",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}


class _Storage:
    """What the interpreter asks of a torch storage."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: Any) -> None:
        """Nothing to copy back: the interpreter wrote in place."""


class _HostTensor:
    """What the interpreter asks of a torch tensor."""

    def __init__(self, array: np.ndarray | None):
        self.array = array

    @property
    def dtype(self) -> str:
        return _TRITON_NAMES[self._array.dtype]

    @property
    def _array(self) -> np.ndarray:
        assert self.array is not None
        return self.array

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self._array)

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self._array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self._array.itemsize for s in self._array.strides)

    def new_empty(self, *_: Any, **__: Any) -> _HostTensor:
        return _HostTensor(None)

    def set_(self, storage: _Storage, *_: Any) -> None:
        self.array = storage.array


def triton_call_interpreted(
    kernel: Any,
    inputs: Sequence[Any],
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: Mapping[int, int],
    constexprs: dict[str, Any],
) -> Sequence[jax.Array]:
    """A kernel's call on the host, everything by position. Outputs start as NaN, so that what a kernel
    forgets to write shows.
    """
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in inputs]

    def call(*arrays):
        remaining = iter(arrays)
        given = [np.ascontiguousarray(next(remaining)) if flag else x for x, flag in zip(inputs, is_array)]
        results = [
            np.full(s.shape, np.nan if jnp.issubdtype(s.dtype, jnp.inexact) else 0, s.dtype) for s in out
        ]
        for i in aliases:
            given[i] = given[i].copy()  # JAX's own memory
        host = [_HostTensor(x) if flag else x for x, flag in zip(given, is_array)]
        with _LOCK:
            kernel[grid](*host, *map(_HostTensor, results), **constexprs)
        for i, output in aliases.items():
            results[output] = given[i]
        return results

    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in out]
    return jax.pure_callback(
        call, shapes, *(x for x, flag in zip(inputs, is_array) if flag), vmap_method="sequential"
    )
