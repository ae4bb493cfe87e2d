"""Runs Triton kernels on the host, in Triton's interpreter, inside `jax.jit`: how their numerics are checked
without a GPU.

Set ``TRITON_INTERPRET=1`` before Triton is imported. Slow; the interpreter's arithmetic in bfloat16 is wrong,
so use float32 inputs. Our tests correct it: tests/harness/interpreter.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .call import TritonCall
from .dtypes import TRITON_DTYPES

# the interpreter patches triton.language while it runs; several devices call at once
_LOCK = threading.Lock()


class _Storage:
    """A NumPy array with the methods of a torch storage that the interpreter calls."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: _Storage) -> None:
        """Nothing to copy back: the interpreter wrote in place."""


class _HostTensor:
    """A NumPy array with the methods of a torch tensor that the interpreter calls."""

    def __init__(self, array: np.ndarray | None):
        self.array = array

    @property
    def dtype(self) -> str:
        return TRITON_DTYPES[self._array.dtype]

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

    def new_empty(self, *_: object, **__: object) -> _HostTensor:
        return _HostTensor(None)

    def set_(self, storage: _Storage, *_: object) -> None:
        self.array = storage.array


def run_interpreted(call: TritonCall, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The call on the host. Outputs start as NaN, so that a number that the kernel does not write shows."""

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        inputs = [np.ascontiguousarray(x) for x in arrays]
        results = [
            np.full(s.shape, np.nan if jnp.issubdtype(s.dtype, jnp.inexact) else 0, s.dtype)
            for s in call.shapes
        ]
        for i, output in call.aliases:
            inputs[i] = results[output] = inputs[i].copy()  # the original is JAX's memory
        parameters = call.parameters([*map(_HostTensor, inputs)], [*map(_HostTensor, results)])
        with _LOCK:
            call.kernel[call.grid](**parameters, **dict(call.constants))
        return results

    return jax.pure_callback(run, list(call.shapes), *arrays, vmap_method="sequential")
