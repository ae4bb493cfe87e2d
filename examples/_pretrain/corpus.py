"""The tokens that ``pretrain.py`` learns: binidx files, or text that is made into them once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
from _cli import about, reason
from _text import text_files
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fla_jax.data import BinIdx, PackedRows, open_binidx, split_rows, tokenize

from .options import Options


class Corpus(NamedTuple):
    """Rows to learn and to evaluate on, each as rows and the numbers of those that are meant."""

    training: tuple[PackedRows, Any]
    evaluation: tuple[PackedRows, Any] | None
    identity: str  # of the training tokens


def read(options: Options, console: Console) -> Corpus:
    """Opens the data; makes tokens of text first, where it was not done before."""
    data = _opened("--data", options.data, options, console)
    rows = _rows("--data", data, options)
    share: Any = options.held_out
    try:
        training, held_out = split_rows(len(rows), share)
    except ValueError:
        raise ValueError(f"--held-out {share:g} leaves nothing of the {len(rows)} rows in --data") from None
    if options.eval_data:
        other = _rows("--eval-data", _opened("--eval-data", options.eval_data, options, console), options)
        evaluation = other, _spread(range(len(other)), options.eval_rows)
    else:
        evaluation = (rows, _spread(held_out, options.eval_rows)) if share else None
    return Corpus((rows, training), evaluation, _identity(data))


def _spread(numbers: Any, count: int) -> list[int]:
    """At most so many of them, at even distances."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def _rows(flag: str, data: BinIdx, options: Options) -> PackedRows:
    try:
        rows = PackedRows(data, options.sequence, options.vocab_size)
    except ValueError:
        found = f"{flag}: {data.path} has {len(data.tokens)} tokens"
        raise ValueError(f"{found}, and --sequence {options.sequence} needs one more than that") from None
    try:
        for i in _spread(range(len(rows)), 16):  # another vocabulary shows before anything is compiled
            rows[i]
    except ValueError as error:
        raise ValueError(f"{flag}: {error} (--vocab-size)") from None
    return rows


def _identity(data: BinIdx) -> str:
    """Of the index and the number of tokens: the same wherever the files lie."""
    digest = hashlib.sha256(data.path.with_suffix(".idx").read_bytes())
    step = max(1, len(data.tokens) // 4096)
    digest.update(np.ascontiguousarray(data.tokens[::step]).tobytes())
    return digest.hexdigest()[:16]


def _opened(flag: str, path: Path | None, options: Options, console: Console) -> BinIdx:
    if path is not None and _is_binidx(path):
        try:
            return open_binidx(path)
        except (ValueError, OSError) as error:
            named = f"{error.filename}: {reason(error)}" if isinstance(error, OSError) else error
            raise ValueError(f"{flag}: {named}") from error
    if path is not None and not path.exists():
        raise ValueError(f"{flag}: there is no {path}")
    with about(f"--cache: {options.cache}", "made"):
        options.cache.mkdir(parents=True, exist_ok=True)
    paths = [_python_documentation(options)] if path is None else _texts(flag, path)
    pair = options.cache / _key(paths, options)
    # other processes, of this run or another, wait for the first one and find its tokens
    with filelock.FileLock(pair.with_suffix(".lock")):
        if not pair.with_suffix(".idx").exists():
            try:
                _tokenize(paths, pair, options, console)
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from error
    return open_binidx(pair)


def _is_binidx(path: Path) -> bool:
    return path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").exists()


def _texts(flag: str, path: Path) -> list[Path]:
    """Files of text: all in a folder but hidden ones and those with NUL bytes."""
    if not path.is_dir():
        return [path]
    found = []
    for file in text_files(path):
        with about(f"{flag}: {file}", "read"), open(file, "rb") as opened:
            if b"\0" not in opened.read(1 << 16):
                found.append(file)
    if not found:
        raise ValueError(f"{flag}: {path} holds no text")
    return found


def _key(paths: list[Path], options: Options) -> str:
    """A name for the tokens: of the files as they are now, the tokenizer, and what it is asked for."""
    files = [(str(path.resolve()), (at := path.stat()).st_size, at.st_mtime_ns) for path in paths]
    tokenizer: Any = options.tokenizer
    if tokenizer and Path(tokenizer).is_file():
        tokenizer = hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    facts = [1, files, tokenizer, options.vocab_size, options.text_field]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _tokenize(paths: list[Path], pair: Path, options: Options, console: Console) -> None:
    columns = [TextColumn("making tokens"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=None)
        tokenize(
            paths,
            pair,
            options.tokenizer,
            vocab_size=options.vocab_size,
            text_field=options.text_field,
            processes=options.tokenizing_processes,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _python_documentation(options: Options) -> Path:
    """The topics of Python's ``help()`` as JSON Lines, each a document; a paragraph is kept once."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    lines = []
    for name in sorted(topics):
        paragraphs = topics[name].split("\n\n")
        kept = [text for text in paragraphs if len(text) <= 80 or text not in seen]
        seen.update(paragraphs)
        lines.append(json.dumps({options.text_field: "\n\n".join(kept)}))
    text = ("\n".join(lines) + "\n").encode()
    path = options.cache / f"python-{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(text)
        os.replace(new, path)
    return path
