"""Documents on disk as random-access sources for `grain.MapDataset.source`: JSON Lines and Parquet.

Grain does the rest: ``shuffle`` by index, ``repeat``, ``map``, ``MapDataset.mix`` by weights, checkpoints of
iterators. A source only says how many documents there are and reads one of them; no file is read whole.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from ..checkpoints import files
from ..core.arguments import check_integer
from .text import Paths, as_paths, parsed

_BLOCK = 1 << 24  # bytes in which line ends are looked for at a time
_SPACES = np.frombuffer(b" \t\n\r\v\f", np.uint8)  # as bytes.strip has them


class JsonLines:
    """The JSON objects of ``.jsonl`` files, a document a line. Lines without text are none.

    The line ends of all files are found once, 16 bytes of memory a document; a document is read and parsed
    when it is asked for, by any number of threads and processes.

    Example:
        >>> import os, tempfile
        >>> import grain
        >>> from fla_jax.data import JsonLines
        >>> with open(os.path.join(tempfile.mkdtemp(), "text.jsonl"), "w") as file:
        ...     _ = file.write('{"text": "one"}\\n{"text": "two"}\\n')
        >>> documents = grain.MapDataset.source(JsonLines(file.name)).shuffle(seed=0).repeat()
        >>> sorted(documents[i]["text"] for i in range(2))
        ['one', 'two']
    """

    def __init__(self, paths: Paths):
        """Finds the lines.

        Args:
            paths: one file or several, read one behind the other.

        Raises:
            ValueError: a path is no regular file, or there is no document. OSError: a file cannot be read.
        """
        self._paths = as_paths(paths)
        spans = [_lines(path) for path in self._paths]
        self._spans = np.concatenate([np.empty((0, 2), np.int64), *spans])
        self._ends = np.cumsum([len(span) for span in spans])
        if not len(self):
            raise ValueError(f"paths must contain a document, got {len(self._paths)} files without any")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, PyTree]:
        """The document, with an index from 0 to ``len(self) - 1``.

        Raises:
            IndexError: there is no such document.
            ValueError: the line is no JSON object; the message names file and offset.
        """
        index = _check_index(index, len(self))
        path = self._paths[int(np.searchsorted(self._ends, index, "right"))]
        begin, end = self._spans[index]
        with open(path, "rb") as file:
            file.seek(begin)
            line = file.read(end - begin)
        value = parsed(path, begin, line)
        if not isinstance(value, dict):
            raise ValueError(f"{path}: the line at offset {begin} must be a JSON object")
        return value


def _check_index(index: int, number: int) -> int:
    if (index := check_integer("index", index, 0)) >= number:
        raise IndexError(f"document {index} of {number}")  # which ends a loop over the source
    return index


def _lines(path: Path) -> np.ndarray:
    """Where the lines with text begin and end, [n, 2]."""
    files.check_regular(path)
    ends, size = [np.zeros(1, np.int64)], path.stat().st_size
    with open(path, "rb") as file:
        for begin in range(0, size, _BLOCK):
            block = np.frombuffer(file.read(_BLOCK), np.uint8)
            ends.append(begin + 1 + np.flatnonzero(block == ord("\n")))
    edges = np.unique(np.concatenate([*ends, [size]]))
    spans = np.stack([edges[:-1], edges[1:]], 1)
    if not size:  # which cannot be mapped
        return spans
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    indented = np.flatnonzero(np.isin(data[spans[:, 0]], _SPACES))  # only these may be without text
    return np.delete(spans, [i for i in indented if not data[slice(*spans[i])].tobytes().strip()], 0)


class ParquetRows:
    """The rows of Parquet files, a document a row, with the package pyarrow.

    Row groups are decoded whole, and the last few of them are kept: to shuffle by index, write row groups of
    some hundred documents. ``grain.experimental.ParquetIterDataset`` reads files with large ones in order.

    Example:
        >>> import os, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> from fla_jax.data import ParquetRows
        >>> path = os.path.join(tempfile.mkdtemp(), "text.parquet")
        >>> table = pyarrow.table({"text": ["one", "two", "three"], "url": ["a", "b", "c"]})
        >>> pyarrow.parquet.write_table(table, path, row_group_size=2)
        >>> ParquetRows(path, columns=["text"])[2]
        {'text': 'three'}
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None, *, cached_groups: int = 16):
        """Reads the metadata of the files.

        Args:
            paths: one file or several, read one behind the other.
            columns: to read; None for all.
            cached_groups: number of row groups that are kept in memory.

        Raises:
            ImportError: pyarrow is not installed.
            TypeError: ``columns`` is one string.
            ValueError: a file is no Parquet file, lacks a column, or there is no row.
            OSError: a file cannot be read.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            what = "Parquet files are read by the package pyarrow"
            raise ImportError(f"{what}: pip install 'fla-jax[data]'") from error
        if isinstance(columns, str):
            raise TypeError(f"columns must be a sequence of names, got the string {columns!r}")
        self._columns = None if columns is None else list(columns)
        self._limit = check_integer("cached_groups", cached_groups, 1)
        self._groups: list[tuple[Path, int]] = []
        sizes = []
        for path in as_paths(paths):
            files.check_regular(path)
            try:
                metadata = pyarrow.parquet.read_metadata(path)
            except pyarrow.ArrowInvalid as error:
                raise ValueError(f"{path} is no Parquet file: {error}") from None
            names = metadata.schema.to_arrow_schema().names
            if missing := sorted(set(self._columns or ()) - set(names)):
                raise ValueError(f"columns must be of {', '.join(names)} in {path}, got {missing[0]!r}")
            for group in range(metadata.num_row_groups):
                self._groups.append((path, group))
                sizes.append(metadata.row_group(group).num_rows)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        if not sizes or not len(self):
            raise ValueError(f"paths must contain a row, got {len(as_paths(paths))} files without any")
        self._start_cache()

    def _start_cache(self) -> None:
        self._cache: collections.OrderedDict[int, PyTree] = collections.OrderedDict()  # pyarrow's tables
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, PyTree]:
        """Without what belongs to one process: grain copies sources to worker processes."""
        return {name: x for name, x in self.__dict__.items() if name not in ("_cache", "_lock")}

    def __setstate__(self, state: dict[str, PyTree]) -> None:
        self.__dict__.update(state)
        self._start_cache()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, PyTree]:
        """The row, by column, with an index from 0 to ``len(self) - 1``; IndexError for another one."""
        index = _check_index(index, len(self))
        group = int(np.searchsorted(self._ends, index, "right"))
        with self._lock:
            table = self._table(group)
        (row,) = table.slice(index - (int(self._ends[group - 1]) if group else 0), 1).to_pylist()
        return row

    def _table(self, group: int) -> PyTree:
        """A row group, kept until others were used more lately."""
        import pyarrow.parquet

        if group not in self._cache:
            path, number = self._groups[group]
            with pyarrow.parquet.ParquetFile(path) as file:
                self._cache[group] = file.read_row_group(number, self._columns)
            while len(self._cache) > self._limit:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return self._cache[group]
