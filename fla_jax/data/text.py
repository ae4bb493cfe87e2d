"""Tokenizes text and JSON Lines files into a binidx pair of files, in several processes."""

from __future__ import annotations

import collections
import concurrent.futures
import io
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from ..checkpoints import files as regular
from ..core.arguments import check_integer
from ..generation import Tokenizer, load_tokenizer
from .binidx import BinIdx, BinIdxWriter, open_binidx

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

END = 0  # the token that ends a document, in all of RWKV's vocabularies
_BLOCK = 1 << 20  # bytes that a process encodes at a time
_SMALL = 8 << 20  # bytes in all that take less time than starting processes


class _Block(NamedTuple):
    """A part of a file that starts and ends with lines."""

    path: Path
    begin: int
    end: int
    last: bool  # of its file


class _Task(NamedTuple):
    block: _Block
    tokenizer: str | os.PathLike[str] | None
    vocab_size: int
    text_field: str


_Encoded = tuple[_Block, list[np.ndarray]]  # the tokens of each document of a block


def as_paths(paths: Paths) -> list[Path]:
    """One path, or several, as a list."""
    found = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [regular.as_path(path) for path in found]


def tokenize(
    paths: Paths,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    vocab_size: int,
    text_field: str = "text",
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BinIdx:
    """Writes the tokens of text files as binidx, each document with the end token 0 behind it.

    A file whose name ends in ``.jsonl`` or ``.ndjson`` has a document in each line, a JSON object with a
    field of text; any other file is one document. Long files are encoded in blocks of about a megabyte, cut
    where lines end, so that the tokens do not depend on the number of processes.

    Args:
        paths: a file, or files, of UTF-8.
        out: the binidx pair, as `open_binidx` takes it. It appears when it is complete.
        tokenizer: as `fla_jax.generation.load_tokenizer` takes it.
        vocab_size: of the model: chooses the tokenizer if None, and the dtype: uint16 up to 65536.
        text_field: of JSON Lines.
        processes: that encode; None for one a core, 1 for the calling process.
        progress: called with the bytes done and the total.

    Returns:
        The opened pair.

    Raises:
        ValueError: a file is not UTF-8, a line is not a JSON object with that field, a token is outside of
            the vocabulary, or there is no text; the message names file and offset.
        OSError, ImportError: see `fla_jax.generation.load_tokenizer`.

    Example:
        >>> import os, tempfile
        >>> from fla_jax.data import tokenize
        >>> folder = tempfile.mkdtemp()
        >>> with open(os.path.join(folder, "text.jsonl"), "w") as file:
        ...     _ = file.write('{"text": "Hi"}')
        >>> tokenize([file.name], os.path.join(folder, "tokens"), vocab_size=256)[0].tolist()
        [72, 105, 0]
    """
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    processes = check_integer("processes", os.cpu_count() if processes is None else processes, 1)
    load_tokenizer(tokenizer, vocab_size=vocab_size)  # fails here rather than in a process
    found = as_paths(paths)
    for path in found:
        regular.check_regular(path)
    total, done, count = sum(path.stat().st_size for path in found), 0, 0
    tasks = (_Task(block, tokenizer, vocab_size, text_field) for path in found for block in _blocks(path))
    if processes == 1 or total < _SMALL:
        encoded: Iterator[_Encoded] = map(_encode, tasks)
    else:
        encoded = _in_processes(tasks, processes)
    with BinIdxWriter(out, np.uint16 if vocab_size <= 1 << 16 else np.uint32) as writer:
        for block, documents in encoded:
            for document in documents:
                writer.add(document, ends=block.last or _is_lines(block.path))
            count, done = count + len(documents), done + block.end - block.begin
            if progress is not None:
                progress(done, total)
        if not count:  # inside the block: an error leaves no files
            raise ValueError(f"paths must contain text, got {len(found)} files without any")
    return open_binidx(out)


def _is_lines(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson")


def _blocks(path: Path) -> Iterator[_Block]:
    size, begin = path.stat().st_size, 0
    with open(path, "rb") as file:
        while begin < size:
            file.seek(min(begin + _BLOCK, size))
            file.readline()
            end = min(file.tell(), size)
            yield _Block(path, begin, end, end == size)
            begin = end


def _in_processes(tasks: Iterator[_Task], processes: int) -> Iterator[_Encoded]:
    """`_encode` of each task, in order; a few blocks a process are read ahead."""
    # a forked process would have JAX's locks, but not the threads that hold them
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        waiting: collections.deque[concurrent.futures.Future[_Encoded]] = collections.deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(_encode, task))
                if len(waiting) > 4 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


_loaded: dict[tuple[str | os.PathLike[str] | None, int], Tokenizer] = {}  # of this process


def _encode(task: _Task) -> _Encoded:
    """The tokens of a block's documents; a document that ends in the block has the end token."""
    block, key = task.block, (task.tokenizer, task.vocab_size)
    if key not in _loaded:
        _loaded[key] = load_tokenizer(task.tokenizer, vocab_size=task.vocab_size)
    with open(block.path, "rb") as file:
        file.seek(block.begin)
        data = file.read(block.end - block.begin)
    if _is_lines(block.path):
        texts = list(_texts(block, data, task.text_field))
        ends = True
    else:
        texts, ends = [(block.begin, decoded(block.path, block.begin, data))], block.last
    documents = []
    for at, text in texts:
        tokens = np.array(_loaded[key].encode(text) + [END] * ends, np.int64)
        if tokens.size and tokens.max() >= task.vocab_size:
            raise ValueError(
                f"{block.path}: the tokenizer makes token {tokens.max()} of the text at offset {at}, and the "
                f"vocabulary has {task.vocab_size}"
            )
        documents.append(tokens)
    return block, documents


def _texts(block: _Block, data: bytes, field: str) -> Iterator[tuple[int, str]]:
    """Offsets and texts of JSON Lines; empty lines are none."""
    at = block.begin
    for line in io.BytesIO(data):  # unlike splitlines, it cuts at b"\n" alone
        if line.strip():
            value = parsed(block.path, at, line)
            if not isinstance(value, dict) or not isinstance(value.get(field), str):
                raise ValueError(
                    f"{block.path}: the line at offset {at} must be a JSON object with the text field "
                    f"{field!r}"
                )
            try:
                value[field].encode()
            except UnicodeEncodeError as error:  # JSON can escape half of a pair of UTF-16
                raise ValueError(
                    f"{block.path}: the line at offset {at} must have text of Unicode characters, got a "
                    f"lone surrogate at character {error.start} of the field {field!r}"
                ) from None
            yield at, value[field]
        at += len(line)


def parsed(path: Path, at: int, line: bytes) -> PyTree:
    """The value of a line of JSON; an error has its offset."""
    text = decoded(path, at, line).removeprefix("\ufeff")  # with which some programs begin a file
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, brackets too deep
        raise ValueError(f"{path}: the line at offset {at} is not JSON: {error}") from None


def decoded(path: Path, at: int, data: bytes) -> str:
    """Text of a file; an error has the offset of the first byte that is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at offset {at + error.start}") from None
