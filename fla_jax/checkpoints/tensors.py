"""Tensors of files: not read before they are wanted, read ahead of their use, copied fast."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

_AHEAD = 4  # tensors that are read while another one is used; no more, since reading may copy them
_BLOCK = 64


class StoredTensor(NamedTuple):
    """A tensor of a file, not read yet.

    Attributes:
        name: as the file has it, for messages.
        shape: sizes of its axes.
        dtype: of its values: float16, bfloat16, float32 or float64.
        read: gives the values; raises ValueError where the file is damaged.
        storage: the piece of the file that the values lie in, where tensors may share one; None for its own.
        room: number of bytes of that piece.

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
    room: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that its values take, written out."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def stored(name: str, x: np.ndarray) -> StoredTensor:
    """An array that is there already, as a tensor of a file.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints import stored
        >>> stored("ln_out.bias", np.arange(3.0)).read()
        array([0., 1., 2.])
    """
    return StoredTensor(name, x.shape, x.dtype, functools.partial(np.asarray, x))


def row_of(tensor: StoredTensor, i: int) -> StoredTensor:
    """One row of a tensor, as a tensor."""
    return tensor._replace(name=f"{tensor.name}[{i}]", shape=tensor.shape[1:], read=lambda: tensor.read()[i])


def quoted(text: Any) -> str:
    """What a file says, as messages show it: quoted, short, without characters that a terminal obeys."""
    text = str(text)
    return repr(text if len(text) <= 200 else text[:200] + "...")


def printable(error: Exception) -> str:
    """What a library says of a file and may quote from it: without characters that a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:500])


def read_ahead(tensors: Iterable[StoredTensor]) -> Iterator[np.ndarray]:
    """The values of each tensor, read in threads while those before are used: that hides the checksums."""
    with ThreadPoolExecutor(_AHEAD) as pool:
        coming: collections.deque[Any] = collections.deque()
        for tensor in tensors:
            coming.append(pool.submit(tensor.read))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """``target[...] = source``; transposed matrices in blocks, several times as fast as all at once."""
    if source.ndim == 2 and source.strides[0] < source.strides[1]:
        for start in range(0, source.shape[1], _BLOCK):
            target[:, start : start + _BLOCK] = source[:, start : start + _BLOCK]
    else:
        target[...] = source


def as_bytes(x: Any) -> memoryview:
    """The values of an array in row-major order; a copy only where they do not lie so."""
    x = np.asarray(x)
    if not x.flags.c_contiguous:
        source, x = x, np.empty(x.shape, x.dtype)
        copy_into(x, source)
    return x.reshape(-1).view(np.uint8).data
