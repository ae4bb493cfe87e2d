"""Documents packed into rows of one length, and batches of them in an order that seed and step determine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from ..core.arguments import check_integer, check_share
from .binidx import BinIdx


class PackedRows:
    """Documents concatenated and cut into examples ("rows") of equal length, without padding.

    Row i is a dict of arrays [length] for tokens i * length to i * length + length - 1:

    * ``tokens`` int32 and ``labels`` int32, the token after each;
    * ``segment_ids`` int32, from 0 in each row: models restart their state where it changes. A document's
      segment starts with the end token of the document before it;
    * ``mask`` float32, 0 where the label is the first token of another segment's document, else 1.

    So the first token of a document is learned from the end token and a zero state, as generation from the
    prompt ``[0]`` reads it. After a document without the end token, the next segment starts with the
    document's first token, which is not learned. A document that crosses the end of a row continues in the
    next one as a new document. RWKV-LM carries the state over: leave ``segment_ids`` out for that.

    Example:
        >>> import os, tempfile
        >>> from fla_jax.data import BinIdxWriter, PackedRows, open_binidx
        >>> name = os.path.join(tempfile.mkdtemp(), "small")
        >>> with BinIdxWriter(name) as writer:
        ...     writer.add([5, 6, 0])
        ...     writer.add([7, 8, 0])
        >>> row = PackedRows(open_binidx(name), 4)[0]
        >>> row["tokens"].tolist(), row["segment_ids"].tolist(), row["mask"].tolist()
        ([5, 6, 0, 7], [0, 0, 1, 1], [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(
        self, data: BinIdx, length: int, vocab_size: int | None = None, *, end_token: int | None = 0
    ):
        """Reads nothing yet.

        Args:
            data: from `open_binidx`.
            length: tokens in a row, T.
            vocab_size: of the model, to refuse other tokens when they are read; None refuses those outside
                of int32 or below 0.
            end_token: the token that ends documents, 0 in all of RWKV's vocabularies. None: segments are
                documents, and no first token is learned.

        Raises:
            ValueError: ``length`` is not a positive integer, ``end_token`` not a token, or the data are
                shorter than a row.
        """
        self.data, self.length = data, check_integer("length", length, 1)
        self.vocab_size = vocab_size
        self.end_token = None if end_token is None else check_integer("end_token", end_token, 0)
        if not len(self):
            raise ValueError(
                f"length must be less than the number of tokens in {data.path}, {len(data.tokens)}, "
                f"got {length}"
            )

    def __len__(self) -> int:
        return (len(self.data.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin = int(index) % len(self) * self.length
        end = begin + self.length + 1
        tokens = self.data.tokens[begin:end]
        most = 2**31 if self.vocab_size is None else self.vocab_size  # rows are int32
        if not 0 <= tokens.min() <= tokens.max() < most:
            at = int(np.argmax((tokens < 0) | (tokens >= most)))
            offset = (begin + at) * self.data.tokens.itemsize
            what = "2**31" if self.vocab_size is None else f"the vocabulary's size {self.vocab_size}"
            raise ValueError(
                f"{self.data.path}: tokens must be below {what}, got {tokens[at]} at offset {offset}"
            )
        starts = self.data.starts
        first, last = np.searchsorted(starts, (begin, end - 1), "right")
        tokens, starting = tokens.astype(np.int32), starts[first:last] - begin  # of documents within the row
        ended = tokens[starting - 1] == (-1 if self.end_token is None else self.end_token)
        is_first, mask = np.zeros(self.length + 1, np.int32), np.ones(self.length + 1, np.float32)
        is_first[starting - ended] = 1  # documents without tokens begin nothing
        is_first[0] = 0
        mask[starting[~ended]] = 0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "segment_ids": np.cumsum(is_first, dtype=np.int32)[:-1],
            "mask": mask[1:],
        }


class RowNumbers(Sequence[int]):
    """Row numbers, computed on access: ``take`` from ``first`` on in each of several blocks of ``size``."""

    def __init__(self, blocks: int, size: int, first: int, take: int):
        """See `split_rows`."""
        self._blocks, self._size, self._first, self._take = blocks, size, first, take

    def __len__(self) -> int:
        return self._blocks * self._take

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        block, inside = divmod(int(index) % len(self), self._take)
        return block * self._size + self._first + inside


def split_rows(rows: int, share: float, blocks: int = 8) -> tuple[RowNumbers, RowNumbers]:
    """Numbers of the rows to train on, and of those to hold out: the last ones of each of a few blocks.

    Args:
        rows: number of rows.
        share: fraction that is held out, from 0 to less than 1; at least one row, except for 0. Blocks hold
            out equally many, so it is rounded down to a multiple of their number.
        blocks: at most this many; up to ``blocks - 1`` rows at the end are left out.

    Returns:
        ``(training, held_out)``.

    Raises:
        ValueError: ``share`` is outside of its range, or there are too few rows.

    Example:
        >>> from fla_jax.data import split_rows
        >>> [list(part) for part in split_rows(10, 0.2, blocks=2)]
        [[0, 1, 2, 3, 5, 6, 7, 8], [4, 9]]
    """
    rows = check_integer("rows", rows, 1)
    share = check_share("share", share)
    blocks = check_integer("blocks", blocks, 1)
    if share == 0:
        return RowNumbers(1, rows, 0, rows), RowNumbers(1, rows, 0, 0)
    held = max(1, round(rows * share))
    if held >= rows:
        raise ValueError(f"rows must be more than the {held} that share = {share:g} holds out, got {rows}")
    blocks = min(blocks, held, rows - held)
    size, take = rows // blocks, held // blocks
    return RowNumbers(blocks, size, 0, size - take), RowNumbers(blocks, size, size - take, take)


def batches(
    rows: PackedRows,
    numbers: Sequence[int],
    size: int,
    *,
    seed: int | None = None,
    part: slice | list[int] | None = None,
    threads: int = 2,
) -> Any:
    """Batches of rows from `grain`, read ahead in threads, with an iterator whose state can be saved.

    Batch i has the same rows for any number of processes. ``iterator.get_state()`` is the number of the next
    batch, and ``iterator.set_state(state)`` continues from there.

    Args:
        rows: the data.
        numbers: of the rows to read.
        size: rows in a batch, B.
        seed: of the order, from 0 to 2**32 - 1: a new one each epoch, without an end. None: each row once
            and in order; the last batch is filled up with rows of mask 0.
        part: which rows of each batch to read, such as `TrainStep.local_batch_rows`; None for all.
        threads: that read ahead.

    Returns:
        A `grain.IterDataset` of dicts of arrays [B, length], see `PackedRows`.

    Raises:
        ImportError: grain is not installed.
        ValueError: a number is outside of its range, or ``numbers`` is empty.

    Example:
        >>> import os, tempfile
        >>> from fla_jax.data import BinIdxWriter, PackedRows, batches, open_binidx
        >>> name = os.path.join(tempfile.mkdtemp(), "small")
        >>> with BinIdxWriter(name) as writer:
        ...     writer.add(range(100))
        >>> rows = PackedRows(open_binidx(name), 8)
        >>> iterator = iter(batches(rows, range(len(rows)), 4, seed=0))
        >>> next(iterator)["tokens"].shape, iterator.get_state()
        ((4, 8), {'next_index': 1})
    """
    try:
        import grain
    except ImportError as error:
        raise ImportError("batches are made by the package grain: pip install 'fla-jax[data]'") from error
    size = check_integer("size", size, 1)
    if not len(numbers):
        raise ValueError("numbers must have at least one row number, got none")

    def read(chosen: np.ndarray) -> dict[str, np.ndarray]:
        missing = size - len(chosen)
        wanted = np.concatenate([chosen, np.repeat(chosen[:1], missing)])
        local = slice(None) if part is None else part
        found = [rows[i] for i in wanted[local]]
        batch = {name: np.stack([row[name] for row in found]) for name in found[0]}
        batch["mask"] *= (np.arange(size) < len(chosen))[local, None]
        return batch

    order = grain.MapDataset.source(numbers)
    if seed is not None:
        # repeated before batching, so that no row is left out
        order = order.shuffle(seed=check_integer("seed", seed, 0, 2**32 - 1)).repeat()
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2 * threads, 1))
    return order.batch(size).map(read).to_iter_dataset(options)


def pack_documents(
    documents: PyTree,
    length: int,
    size: int,
    *,
    carry_state: bool = False,
    end_token: int | None = 0,
    vocab_size: int | None = None,
    part: slice | list[int] | None = None,
) -> PyTree:
    """Batches of documents from any `grain.MapDataset`, packed into rows as they come.

    Row b of a batch continues row b of the batch before: it packs the documents b, b + B, b + 2 B and so on,
    one behind the other, and a document that crosses the end of a row goes on in the next batch. A batch has
    int32 ``tokens``, ``labels`` and ``segment_ids`` and float32 ``mask``, all [B, length], as `PackedRows`
    has them.

    With ``carry_state`` it also has booleans ``continues`` [B]: the document of the row's first token is that
    of the last row's end, and the recurrent state can be carried on, as `fla_jax.training.carried_loss` does.
    Long documents are then learned as if rows had no ends, but for gradients, which end with a row. Without
    it the rest of a document starts from a zero state.

    Args:
        documents: a `grain.MapDataset` of integer arrays [n], such as a source, shuffled by index, repeated,
            mixed by weights and tokenized; `open_binidx` is a source of such arrays. Documents that its
            ``filter`` removes are left out.
        length: tokens in a row, T.
        size: rows in a batch, B.
        carry_state: whether batches have ``continues``.
        end_token: in front of each document, so that its first token is learned from it and a zero state.
            Documents should end with it. None: no first token is learned.
        vocab_size: of the model, to refuse other tokens.
        part: which rows of each batch to make, such as `TrainStep.local_batch_rows`; None for all. An
            iterator ends when these rows do: processes that train together need documents without an end.

    Returns:
        A `grain.IterDataset`. Its iterator's state, two integers a row, is saved by `TrainingCheckpoints`,
        after `gather_state` where several processes make parts, or by grain's own `CheckpointSave`. Where
        ``documents`` end, rows are filled up with mask 0.

    Raises:
        ImportError: grain is not installed.
        ValueError: an argument is outside of its range. Iterating: a row's next million documents are without
            labels, or the iterator's state is of other documents. TypeError: ``documents`` is no
            `grain.MapDataset`.

    Example:
        >>> import grain, numpy as np
        >>> from fla_jax.data import pack_documents
        >>> documents = grain.MapDataset.source([np.array([5, 6, 7, 8, 0]), np.array([9, 0])])
        >>> for batch in pack_documents(documents, length=4, size=1, carry_state=True):
        ...     print(batch["tokens"][0], batch["labels"][0], batch["segment_ids"][0], batch["continues"])
        [0 5 6 7] [5 6 7 8] [0 0 0 0] [False]
        [8 0 9 0] [0 9 0 0] [0 1 1 2] [ True]
    """
    try:
        import grain

        from .documents import PackedDocuments
    except ImportError as error:
        raise ImportError("documents are read by the package grain: pip install 'fla-jax[data]'") from error
    if not isinstance(documents, grain.MapDataset):
        raise TypeError(f"documents must be a grain.MapDataset, got {type(documents).__name__}")
    size = check_integer("size", size, 1)
    vocab_size = None if vocab_size is None else check_integer("vocab_size", vocab_size, 1)
    if end_token is not None:
        end_token = check_integer("end_token", end_token, 0, None if vocab_size is None else vocab_size - 1)
    lanes = np.arange(size)[slice(None) if part is None else part].tolist()
    return PackedDocuments(
        documents,
        check_integer("length", length, 1),
        lanes,
        size,
        end_token,
        vocab_size,
        carry_state,
    )
