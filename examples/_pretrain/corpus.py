"""The tokens that ``pretrain.py`` learns: binidx files, or text that is tokenized into them once."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
from _cli import about, reason
from _text import python_topics, text_files
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fla_jax.checkpoints.files import replacing
from fla_jax.data import (
    BinIdx,
    PackedRows,
    batches,
    gather_state,
    open_binidx,
    pack_documents,
    split_rows,
    tokenize,
)

from .options import Options


class Part(NamedTuple):
    """Tokens, and the numbers of those to read: of rows, or with ``--carry-state`` of documents."""

    data: BinIdx
    rows: PackedRows
    numbers: Any


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What to learn and to evaluate on."""

    options: Options
    training: Part
    evaluation: Part | None
    identity: str  # of the training tokens

    @property
    def num_rows(self) -> int:
        """Rows of an epoch; with ``--carry-state`` about as many."""
        data, rows, numbers = self.training
        return len(rows) * len(numbers) // len(data) if self.options.carry_state else len(numbers)

    def batches(self, local: list[int]) -> Any:
        """Endless batches to train on, of which this process makes the rows ``local``."""
        options, (_, rows, numbers) = self.options, self.training
        if not options.carry_state:
            return batches(rows, numbers, options.batch, seed=options.seed, part=local)
        return self._documents(self.training, lambda found: found.shuffle(seed=options.seed).repeat(), local)

    def held_out(self, local: list[int]) -> Any:
        """At most ``--eval-rows`` rows to evaluate on, in batches."""
        assert self.evaluation is not None
        options, (_, rows, numbers) = self.options, self.evaluation
        if not options.carry_state:
            return batches(rows, numbers, options.batch, part=local)
        # whole batches in every process: parts of them end after different numbers of batches
        found = self._documents(self.evaluation, lambda found: found, [*range(options.batch)])
        found = itertools.islice(found, -(-options.eval_rows // options.batch))
        return ({name: x[local] for name, x in batch.items()} for batch in found)

    def place(self, iterator: Any, local: list[int]) -> dict[str, Any]:
        """The place of an iterator of `batches`, for any number of processes; all of them call this."""
        state = iterator.get_state()
        return gather_state(state, self.options.batch, local) if self.options.carry_state else state

    def _documents(self, part: Part, order: Any, local: list[int]) -> Any:
        import grain

        source = order(grain.MapDataset.source(part.numbers)).map(lambda i: part.data[i])
        sizes = self.options.sequence, self.options.batch
        return pack_documents(
            source, *sizes, carry_state=True, vocab_size=self.options.vocab_size, part=local
        )


def read(options: Options, console: Console) -> Corpus:
    """Opens the data; tokenizes text first, unless the cache has its tokens."""
    data = _opened("--data", options.data, options, console)
    rows = _rows("--data", data, options)
    units: Any = data if options.carry_state else rows
    share: Any = options.held_out
    try:
        training, held_out = split_rows(len(units), share)
    except ValueError:
        what = f"{len(units)} {'documents' if options.carry_state else 'rows'}"
        raise ValueError(f"--held-out {share:g} leaves nothing of the {what} in --data") from None
    evaluation = None
    if options.eval_data:
        other = _opened("--eval-data", options.eval_data, options, console)
        other_rows = _rows("--eval-data", other, options)
        numbers = range(len(other if options.carry_state else other_rows))
        evaluation = Part(other, other_rows, _spread(numbers, options.eval_rows))
    elif share:
        evaluation = Part(data, rows, _spread(held_out, options.eval_rows))
    return Corpus(options, Part(data, rows, training), evaluation, _identity(data))


def _spread(numbers: Any, count: int) -> list[int]:
    """At most ``count`` of them, evenly spaced."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def _rows(flag: str, data: BinIdx, options: Options) -> PackedRows:
    try:
        rows = PackedRows(data, options.sequence, options.vocab_size)
    except ValueError:
        found = f"{flag}: {data.path} has {len(data.tokens)} tokens"
        raise ValueError(f"{found}, and --sequence {options.sequence} needs one more than that") from None
    try:
        for i in _spread(range(len(rows)), 16):  # a wrong vocabulary shows before anything compiles
            rows[i]
    except ValueError as error:
        raise ValueError(f"{flag}: {error} (--vocab-size)") from None
    return rows


def _identity(data: BinIdx) -> str:
    """A hash of the index and of some tokens: the same wherever the files are."""
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
    paths = [] if path is None else text_files(flag, path)
    with about(f"--cache: {options.cache}", "made"):
        options.cache.mkdir(parents=True, exist_ok=True)
    paths = paths or [_python_documentation(options)]
    pair = options.cache / _key(paths, options)
    # other processes wait for the first one, and find its tokens
    with filelock.FileLock(pair.with_suffix(".lock")):
        if not pair.with_suffix(".idx").exists():
            try:
                _tokenize(paths, pair, options, console)
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from error
    return open_binidx(pair)


def _is_binidx(path: Path) -> bool:
    return path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").exists()


def _key(paths: list[Path], options: Options) -> str:
    """A name for the tokens: a hash of the files' sizes and times, the tokenizer and the options."""
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
    """The topics of Python's ``help()`` as JSON Lines, a document each."""
    text = "".join(json.dumps({options.text_field: topic}) + "\n" for topic in python_topics()).encode()
    path = options.cache / f"python-{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
    if not path.exists():
        with replacing(path) as file:
            file.write(text)
    return path
