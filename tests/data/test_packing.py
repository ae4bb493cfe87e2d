"""Packed rows against the documents one by one; batches: order, epochs, processes, saved iterators."""

import json
import re

import numpy as np
import pytest

from fla_jax.data import BinIdxWriter, PackedRows, batches, open_binidx, split_rows


def make(folder, lengths, seed=0):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 200, n) for n in lengths]
    with BinIdxWriter(folder / "d") as writer:
        for document in documents:
            writer.add(document)
    return open_binidx(folder / "d"), documents


def check_rows(rows, documents, owner):
    """Token by token: ``owner`` is the document whose segment each token lies in."""
    flat, whose = np.concatenate(documents), [i for i, document in enumerate(documents) for _ in document]
    assert len(rows) == (len(flat) - 1) // rows.length
    for i in range(len(rows)):
        row, at = rows[i], range(i * rows.length, (i + 1) * rows.length)
        np.testing.assert_array_equal(row["tokens"], flat[list(at)])
        np.testing.assert_array_equal(row["labels"], [flat[t + 1] for t in at])
        np.testing.assert_array_equal(row["mask"], [owner[t] == whose[t + 1] for t in at])
        numbers = sorted({owner[t] for t in at})
        np.testing.assert_array_equal(row["segment_ids"], [numbers.index(owner[t]) for t in at])
        assert {name: x.dtype.name for name, x in row.items()} == DTYPES


DTYPES = {"tokens": "int32", "labels": "int32", "segment_ids": "int32", "mask": "float32"}
LENGTHS = [5, 1, 0, 12, 3, 0, 0, 1, 1, 9, 20, 4]


def test_rows_are_the_documents(tmp_path):
    data, documents = make(tmp_path, LENGTHS)
    owner = [i for i, document in enumerate(documents) for _ in document]
    for length in (1, 4, 7, 50):
        check_rows(PackedRows(data, length, vocab_size=200), documents, owner)
    with pytest.raises(IndexError):
        PackedRows(data, 4)[len(PackedRows(data, 4))]


@pytest.mark.parametrize("end_token", [0, 7])
def test_first_tokens_are_learned_from_the_end_token(tmp_path, end_token):
    """The end token of a document belongs to the segment of the next one that has tokens."""
    documents = [np.where(x == end_token, 8, x) for x in make(tmp_path, LENGTHS)[1]]
    for i in (0, 3, 4, 7, 9, 10):  # documents 7 and 8 have one token: an end token, and another one
        documents[i][-1] = end_token
    documents[9][2] = end_token  # within a document it ends nothing
    with BinIdxWriter(tmp_path / "ended") as writer:
        for document in documents:
            writer.add(document)
    data, owner = open_binidx(tmp_path / "ended"), []
    for i, document in enumerate(documents):
        owner += [i] * len(document)
        if len(document) and document[-1] == end_token:
            owner[-1] = next((j for j in range(i + 1, len(documents)) if len(documents[j])), i)
    for length in (1, 4, 7, 50):
        check_rows(PackedRows(data, length, end_token=end_token), documents, owner)
    check_rows(
        PackedRows(data, 7, end_token=None), documents, [i for i, x in enumerate(documents) for _ in x]
    )


def test_refusals(tmp_path):
    data, documents = make(tmp_path, [30, 30])
    flat = np.concatenate(documents)
    largest = int(flat[:29].max())
    offset = 2 * int(np.argmax(flat[:29]))
    with pytest.raises(ValueError, match=rf"d\.bin: .* size {largest}, got {largest} at offset {offset}"):
        PackedRows(data, 28, vocab_size=largest)[0]
    for token, dtype in ((2**32 - 1, np.uint32), (2**63 + 5, np.uint64), (-1, np.int64)):
        with BinIdxWriter(tmp_path / "wide", dtype) as writer:
            writer.add(np.array([1, 2, token], dtype))
        offset = 2 * np.dtype(dtype).itemsize
        for size, most in ((None, "2**31"), (5, "the vocabulary's size 5")):
            message = f"tokens must be below {most}, got {token} at offset {offset}"
            with pytest.raises(ValueError, match=re.escape(message)):
                PackedRows(open_binidx(tmp_path / "wide"), 2, size)[0]
    with pytest.raises(ValueError, match=r"length must be less than .*d\.bin, 60, got 60"):
        PackedRows(data, 60)
    with pytest.raises(ValueError, match="length must be an integer >= 1, got 0"):
        PackedRows(data, 0)
    with pytest.raises(ValueError, match="end_token must be an integer >= 0, got -1"):
        PackedRows(data, 4, end_token=-1)
    for arguments, message in {
        (0, 0.1): "rows must be",
        (10, 1.0): "share must be below 1",
        (1, 0.5): "rows must be more than the 1 that share = 0.5 holds out, got 1",
    }.items():
        with pytest.raises(ValueError, match=message):
            split_rows(*arguments)


@pytest.mark.parametrize("count, share", [(2, 0.1), (100, 0.05), (1003, 0.2), (50, 0.0), (9, 0.9)])
def test_split(count, share):
    training, held = (list(part) for part in split_rows(count, share))
    assert not set(training) & set(held) and len(set(training)) == len(training)
    assert all(0 <= row < count for row in training + held)
    assert count - 8 < len(training) + len(held) <= count
    assert len(held) == pytest.approx(count * share, abs=8) and bool(held) == (share > 0)


def test_batches(tmp_path):
    rows = PackedRows(make(tmp_path, [40] * 10)[0], 16)
    numbers = split_rows(len(rows), 0.2)[0]
    known = {row["tokens"].tobytes(): number for number in numbers for row in [rows[number]]}
    iterator = iter(batches(rows, numbers, 3, seed=5))
    taken = [next(iterator) for _ in range(2 * len(numbers) // 3)]
    assert all(batch[name].shape == (3, 16) for batch in taken for name in batch)
    order = [known[row.tobytes()] for batch in taken for row in batch["tokens"]]
    first, second = order[: len(numbers)], order[len(numbers) : 2 * len(numbers)]
    assert sorted(first) == list(numbers) and sorted(set(second)) == sorted(second) and second != first
    # two processes read the parts of the same batches
    parts = [iter(batches(rows, numbers, 3, seed=5, part=part)) for part in (slice(0, 2), slice(2, 3))]
    for batch in taken:
        halves = [next(part) for part in parts]
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), batch[name])
    assert iterator.get_state() == parts[0].get_state() == parts[1].get_state()
    # a saved iterator goes on where it was
    resumed = iter(batches(rows, numbers, 3, seed=5))
    for _ in range(4):
        next(resumed)
    state = json.loads(json.dumps(resumed.get_state()))
    fresh = iter(batches(rows, numbers, 3, seed=5))
    fresh.set_state(state)
    np.testing.assert_array_equal(next(fresh)["tokens"], taken[4]["tokens"])
    assert order != [known[row.tobytes()] for row in next(iter(batches(rows, numbers, 3, seed=6)))["tokens"]]


def test_batches_in_order_are_filled_up(tmp_path):
    rows = PackedRows(make(tmp_path, [40] * 4)[0], 16)
    found = list(batches(rows, range(5), 3))
    assert [batch["tokens"].shape for batch in found] == [(3, 16)] * 2
    np.testing.assert_array_equal(found[1]["tokens"][1], rows[4]["tokens"])
    assert not found[1]["mask"][2].any() and found[1]["mask"][1].any()
    with pytest.raises(ValueError, match="numbers must have at least one"):
        batches(rows, [], 3)


def test_errors_of_a_row_reach_the_user(tmp_path):
    rows = PackedRows(make(tmp_path, [40] * 4)[0], 16, vocab_size=2)
    with pytest.raises(ValueError, match=r"d\.bin: tokens must be below"):
        next(iter(batches(rows, range(4), 2, seed=0)))
