"""The binidx format of RWKV's and Megatron's data: the tokens of all documents, and an index of them.

``NAME.bin`` has the tokens. ``NAME.idx``, all little-endian: the magic b"MMIDIDX\\0\\0",
uint64 version 1, uint8 dtype, uint64 number of sequences n, uint64 number of document entries d, int32 [n]
lengths of the sequences, int64 [n] offsets of the sequences in bytes, int64 [d] the sequence that each
document begins with, and n at the end.
"""

from __future__ import annotations

import array
import contextlib
import os
import struct
import types
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..checkpoints import files

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION_AT, _DTYPE_AT, _COUNTS_AT = 9, 17, 18
# 9 and 10 are GPT-NeoX's; 6 and 7 are floats
_CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}
_DTYPES = {code: np.dtype(name).newbyteorder("<") for code, name in _CODES.items()}


class BinIdx:
    """Documents in a binidx pair of files, mapped into memory and read on access.

    Attributes:
        path: of the .bin file.
        tokens: all tokens, [N], in the file's dtype.
        starts: [D + 1] int64: document i is ``tokens[starts[i] : starts[i + 1]]``.

    Example:
        >>> import os, tempfile
        >>> from fla_jax.data import BinIdxWriter, open_binidx
        >>> name = os.path.join(tempfile.mkdtemp(), "small")
        >>> with BinIdxWriter(name) as writer:
        ...     writer.add([5, 6, 0])
        >>> data = open_binidx(name)
        >>> len(data), data[0].tolist(), data.starts.tolist()
        (1, [5, 6, 0], [0, 3])
    """

    def __init__(self, path: Path, tokens: np.ndarray, starts: np.ndarray):
        """Use `open_binidx`."""
        self.path, self.tokens, self.starts = path, tokens, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        return self.tokens[self.starts[index] : self.starts[index + 1]]


def both_paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The .bin and .idx file of a pair, which is named by either of them or by what they have in common."""
    given = files.as_path(path)
    stem = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def open_binidx(path: str | os.PathLike[str]) -> BinIdx:
    """Opens a binidx pair of files.

    Args:
        path: of the .bin file, of the .idx file, or both without their ending.

    Returns:
        A `BinIdx`. Where the index names no documents, every sequence is one.

    Raises:
        ValueError: a file is cut off, damaged, or of another kind; the message names it and the offset in
            bytes.
        FileNotFoundError: one of the files is missing.

    Example:
        >>> import os, tempfile, numpy as np
        >>> from fla_jax.data import BinIdxWriter, open_binidx
        >>> name = os.path.join(tempfile.mkdtemp(), "small")
        >>> with BinIdxWriter(name, np.uint16) as writer:
        ...     writer.add([5, 6, 0])
        ...     writer.add([7, 0])
        >>> [document.tolist() for document in open_binidx(name)]
        [[5, 6, 0], [7, 0]]
    """
    bin_path, idx_path = both_paths(path)
    for file in (bin_path, idx_path):
        files.check_regular(file)
    dtype, lengths, pointers, documents = _read_index(idx_path)
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    wrong = np.flatnonzero(pointers != starts[:-1] * dtype.itemsize)
    if wrong.size:
        i = int(wrong[0])
        at = _HEADER.size + 4 * len(lengths) + 8 * i
        wanted = int(starts[i]) * dtype.itemsize
        raise ValueError(
            f"{idx_path}: sequence {i} must begin where the one before ends, at byte {wanted} of "
            f"{bin_path.name}, got {pointers[i]} at offset {at}"
        )
    size, wanted = bin_path.stat().st_size, total * dtype.itemsize
    if size != wanted:
        what = "ends" if size < wanted else "goes on"
        raise ValueError(
            f"{bin_path} {what} at offset {min(size, wanted)}: {idx_path.name} tells of {total} tokens of "
            f"{dtype.itemsize} bytes, {wanted} bytes, got {size}"
        )
    if total == 0:
        raise ValueError(f"{bin_path} contains no tokens")
    if len(documents) > 1:
        starts = starts[documents]
    return BinIdx(bin_path, np.memmap(bin_path, dtype, "r"), starts)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Dtype of the tokens, lengths and offsets of the sequences, first sequences of the documents."""
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        raise ValueError(
            f"{path} is no binidx index: it must begin with {MAGIC!r}, got {header[: len(MAGIC)]!r} "
            "at offset 0"
        )
    size = path.stat().st_size
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} ends at offset {size}, within its header of {_HEADER.size} bytes")
    _, version, code, count, entries = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{path}: the version must be 1, got {version} at offset {_VERSION_AT}")
    if code not in _DTYPES:
        known = ", ".join(f"{key} ({dtype.name})" for key, dtype in _DTYPES.items())
        raise ValueError(
            f"{path}: the tokens' dtype must be one of {known}, got {code} at offset {_DTYPE_AT}"
        )
    wanted = _HEADER.size + 12 * count + 8 * entries
    if size != wanted:
        what = f"{count} sequences and {entries} document entries (offset {_COUNTS_AT})"
        problem = "ends" if size < wanted else "goes on"
        raise ValueError(
            f"{path} {problem} at offset {min(size, wanted)}: with {what} it has {wanted} bytes, got {size}"
        )
    if count == 0:
        raise ValueError(f"{path} contains no sequence: their number is 0 at offset {_COUNTS_AT}")
    data = np.memmap(path, np.uint8, "r")
    first = _HEADER.size + 4 * count
    second = first + 8 * count
    lengths = data[_HEADER.size : first].view("<i4")
    pointers, documents = data[first:second].view("<i8"), data[second:].view("<i8")
    negative = np.flatnonzero(lengths < 0)
    if negative.size:
        i = int(negative[0])
        raise ValueError(f"{path}: a sequence has the length {lengths[i]} at offset {_HEADER.size + 4 * i}")
    _check_documents(path, documents, count, second)
    return _DTYPES[code], lengths, pointers, documents


def _check_documents(path: Path, documents: np.ndarray, count: int, at: int) -> None:
    """Refuses first sequences that do not ascend from 0 to ``count``; an empty list and [0] are valid."""
    if not len(documents) or (len(documents) == 1 and documents[0] == 0):
        return
    wrong = np.flatnonzero(np.diff(documents) < 0)
    i = int(wrong[0]) + 1 if wrong.size else 0 if documents[0] else len(documents) - 1
    if wrong.size or documents[0] or documents[-1] != count:
        raise ValueError(
            f"{path}: the documents' first sequences must ascend from 0 to {count}, got {documents[i]} at "
            f"offset {at + 8 * i}"
        )


class BinIdxWriter:
    """Writes a binidx pair of files, document by document; a context manager, entered once.

    The files appear when the block ends. If it raises, earlier files stay.

    Example:
        >>> import os, tempfile, numpy as np
        >>> from fla_jax.data import BinIdxWriter
        >>> name = os.path.join(tempfile.mkdtemp(), "small")
        >>> with BinIdxWriter(name, np.uint32) as writer:
        ...     writer.add([70000], ends=False)
        ...     writer.add([0])
        >>> os.path.getsize(name + ".bin")
        8
    """

    def __init__(self, path: str | os.PathLike[str], dtype: DTypeLike = np.uint16):
        """Nothing is written yet.

        Args:
            path: as `open_binidx` takes it.
            dtype: of the tokens, an integer one: uint16, or uint32 where the vocabulary is larger.

        Raises:
            ValueError: the format has no such dtype.
        """
        codes = {dtype: code for code, dtype in _DTYPES.items()}
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in codes:
            raise ValueError(f"dtype must be one of {', '.join(d.name for d in codes)}, got {self._dtype}")
        self._code, (self._bin, self._idx) = codes[self._dtype], both_paths(path)
        self._lengths, self._open = array.array("i"), 0
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO | None = None
        self._was_entered = False

    def __enter__(self) -> BinIdxWriter:
        """Starts the files.

        Raises:
            ValueError: the writer was entered before. OSError: the .bin file cannot be written.
        """
        if self._was_entered:
            raise ValueError(f"a BinIdxWriter can be entered once: create another one to write {self._bin}")
        self._file = self._stack.enter_context(files.replacing(self._bin))
        self._was_entered = True
        return self

    def add(self, tokens: ArrayLike, *, ends: bool = True) -> None:
        """Appends a document, or a part of one.

        Args:
            tokens: a sequence of integers, with the document's end token, if any.
            ends: whether the document ends with them, or continues with the next call's.

        Raises:
            ValueError: a token is outside of the dtype's range, the document has 2**31 tokens or more, or the
                call is outside of the writer's ``with``.
        """
        if self._file is None:
            raise ValueError("tokens can be added inside the writer's with statement only")
        tokens, bounds = np.asarray(tokens), np.iinfo(self._dtype)
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise ValueError(f"tokens must be integers [N], got {tokens.dtype} {list(tokens.shape)}")
        if tokens.size and not bounds.min <= tokens.min() <= tokens.max() <= bounds.max:
            raise ValueError(
                f"tokens must be from {bounds.min} to {bounds.max} for {self._dtype.name}, got "
                f"{tokens.min()} to {tokens.max()}"
            )
        self._open += len(tokens)
        if self._open >= 2**31:
            raise ValueError(f"tokens of one document must be less than 2**31, got {self._open}")
        self._file.write(tokens.astype(self._dtype).tobytes())
        if ends:
            self._lengths.append(self._open)
            self._open = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if self._open and error is None:
            self._lengths.append(self._open)
        if error is None:
            self._idx.unlink(missing_ok=True)  # the index makes a pair complete
        self._file = None
        self._stack.__exit__(kind, error, traceback)  # the .bin file replaces the old one, or is removed
        if error is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.array(self._lengths, "<i4")
        count = len(lengths)
        pointers = np.zeros(count, "<i8")
        np.cumsum(lengths[:-1], out=pointers[1:])
        pointers *= self._dtype.itemsize
        with files.replacing(self._idx) as file:
            file.write(_HEADER.pack(MAGIC, 1, self._code, count, count + 1))
            for part in (lengths, pointers, np.arange(count + 1, dtype="<i8")):
                file.write(part.tobytes())
