"""Documents packed into rows as they come: each row of a batch continues that of the batch before."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown

Batch = dict[str, np.ndarray]
_MOST_EMPTY = 10**6  # documents without labels, one after the other: in a repeated set the search never ends


class PackedDocuments(grain.IterDataset):
    """See `fla_jax.data.pack_documents`."""

    def __init__(
        self,
        documents: grain.MapDataset,
        length: int,
        lanes: Sequence[int],
        num_lanes: int,
        end_token: int | None,
        vocab_size: int | None,
        carry_state: bool,
    ):
        """``lanes``: the numbers of the rows of a batch, of ``num_lanes``, that are made here."""
        super().__init__()
        self.documents, self.length, self.carry_state = documents, length, carry_state
        self.lanes, self.num_lanes = list(lanes), num_lanes
        self.end_token, self.vocab_size = end_token, vocab_size

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(self)

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of a document, of one length; empty where a filter has removed it."""
        document = self.documents[index]
        tokens = np.asarray([] if document is None else document)
        if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
            got = f"{tokens.dtype} {list(tokens.shape)}"
            raise TypeError(f"documents must be arrays of integers [n], got {got} at index {index}")
        limit = 2**31 if self.vocab_size is None else self.vocab_size
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < limit:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ValueError(
                f"documents must have tokens from 0 to {limit - 1}, got {wrong} at index {index}"
            )
        if self.end_token is None:
            return tokens[:-1], tokens[1:]
        return np.concatenate([[self.end_token] * (tokens.size > 0), tokens[:-1]]), tokens


class _Iterator(grain.DatasetIterator):
    """Lane b packs the documents b, b + B, b + 2 B, ...: its place is a document's number, and one in it."""

    def __init__(self, dataset: PackedDocuments):
        super().__init__()
        self._dataset = dataset
        self._document = list(dataset.lanes)
        self._offset = [0] * len(dataset.lanes)
        self._pairs: dict[int, tuple[int, tuple[np.ndarray, np.ndarray]]] = {}  # the document of each lane

    def __next__(self) -> Batch:
        rows = [self._row(lane) for lane in range(len(self._document))]
        if not any(row["mask"].any() for row in rows):
            raise StopIteration
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, lane: int) -> Batch:
        """The next row of a lane; behind the last document it has zeros and mask 0."""
        data, filled, segment, empty = self._dataset, 0, 0, 0
        names = {"tokens": np.int32, "labels": np.int32, "segment_ids": np.int32, "mask": np.float32}
        row = {name: np.zeros(data.length, dtype) for name, dtype in names.items()}
        if data.carry_state:
            row["continues"] = np.array(self._offset[lane] > 0)
        while filled < data.length and self._document[lane] < len(data.documents):
            tokens, labels = self._pair(lane)
            begin = self._offset[lane]
            if begin and begin >= len(labels):
                raise ValueError(
                    f"state is of other documents: that at index {self._document[lane]} has {len(labels)} "
                    f"labels, and the state goes on behind {begin} of them"
                )
            taken = min(len(labels) - begin, data.length - filled)
            where = slice(filled, filled + taken)
            row["tokens"][where], row["labels"][where] = (x[begin : begin + taken] for x in (tokens, labels))
            row["segment_ids"][where], row["mask"][where] = segment, 1
            filled, segment, self._offset[lane] = filled + taken, segment + (taken > 0), begin + taken
            empty = 0 if taken else empty + 1
            if empty == _MOST_EMPTY:
                raise ValueError(
                    f"documents must have labels: {empty} of row {data.lanes[lane]} of a batch, one after "
                    f"the other, have none, the last at index {self._document[lane]}"
                )
            if self._offset[lane] == len(labels):
                self._document[lane] += data.num_lanes
                self._offset[lane] = 0
        row["segment_ids"][filled:] = segment
        return row

    def _pair(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """The document of a lane, read once for all rows that it is in."""
        index = self._document[lane]
        known = self._pairs.get(lane)
        if known is None or known[0] != index:
            known = self._pairs[lane] = index, self._dataset.pair(index)
        return known[1]

    def get_state(self) -> dict[str, PyTree]:
        """The place of every lane; a JSON object."""
        return {"document": list(self._document), "offset": list(self._offset)}

    def set_state(self, state: dict[str, PyTree]) -> None:
        """Continues from a place: of these lanes, or of all lanes of a batch, of which it takes these."""
        lanes, rows = self._dataset.lanes, self._dataset.num_lanes
        try:
            both = zip(state["document"], state["offset"], strict=True)
            places = [(check_integer("document", n, 0), check_integer("offset", x, 0)) for n, x in both]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state must be what get_state returned, got {shown(state)}") from error
        if len(places) not in (len(lanes), rows):
            raise ValueError(f"state must be of {len(lanes)} rows of a batch, got one of {len(places)}")
        # by the documents' numbers: a list of lanes may have any order, also one of all lanes
        of_lane = {document % rows: (document, offset) for document, offset in places}
        if missing := sorted(set(lanes) - set(of_lane)):
            raise ValueError(f"state must be of the rows {lanes} of a batch, got none of row {missing[0]}")
        self._document = [of_lane[lane][0] for lane in lanes]
        self._offset = [of_lane[lane][1] for lane in lanes]
