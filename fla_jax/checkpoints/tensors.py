"""Tensors of files: read when they are needed, ahead of their use, and copied fast."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import flax.linen as nn
import numpy as np
from jaxtyping import PyTree
from numpy.typing import ArrayLike

Shardings = Callable[[nn.Module], PyTree]  # of a model's parameters

_AHEAD = 4  # tensors that are read while another one is used; reading may copy them
_BLOCK = 64


class StoredTensor(NamedTuple):
    """A tensor of a file, not read yet.

    Attributes:
        name: as the file has it, for messages.
        shape: sizes of its axes.
        dtype: of its values: float16, bfloat16, float32 or float64.
        read: gives the values; raises ValueError where the file is damaged.
        storage: the part of the file that has the values, where tensors may share one; None if they cannot.
        storage_nbytes: number of bytes of that part.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints import stored
        >>> tensor = stored("head.weight", np.zeros((100, 64), np.float16))
        >>> tensor.shape, tensor.dtype, tensor.nbytes
        ((100, 64), dtype('float16'), 12800)
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    storage: Hashable = None
    storage_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of its values."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def stored(name: str, x: np.ndarray) -> StoredTensor:
    """An array as a `StoredTensor`.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints import stored
        >>> stored("ln_out.bias", np.arange(3.0)).read()
        array([0., 1., 2.])
    """
    return StoredTensor(name, x.shape, x.dtype, functools.partial(np.asarray, x))


def slice_of(tensor: StoredTensor, i: int) -> StoredTensor:
    """``tensor[i]``, not read yet."""
    return tensor._replace(name=f"{tensor.name}[{i}]", shape=tensor.shape[1:], read=lambda: tensor.read()[i])


def quoted(text: object) -> str:
    """Text of a file for a message: quoted, short, without control characters."""
    text = str(text)
    return repr(text if len(text) <= 200 else text[:200] + "...")


def printable(error: Exception) -> str:
    """The message of an error that may quote a file: short, without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:500])


def read_ahead(tensors: Iterable[StoredTensor]) -> Iterator[np.ndarray]:
    """The values of each tensor, read in threads while earlier ones are used, which hides the checksums."""
    with ThreadPoolExecutor(_AHEAD) as pool:
        coming: collections.deque[Future[np.ndarray]] = collections.deque()
        for tensor in tensors:
            coming.append(pool.submit(tensor.read))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """``target[...] = source``; transposed matrices in blocks, which is several times as fast."""
    if source.ndim == 2 and source.strides[0] < source.strides[1]:
        for start in range(0, source.shape[1], _BLOCK):
            target[:, start : start + _BLOCK] = source[:, start : start + _BLOCK]
    else:
        target[...] = source


def as_bytes(x: ArrayLike) -> memoryview:
    """The values of an array in row-major order; a copy only of arrays in another order."""
    x = np.asarray(x)
    if not x.flags.c_contiguous:
        source, x = x, np.empty(x.shape, x.dtype)
        copy_into(x, source)
    return x.reshape(-1).view(np.uint8).data
