"""Packed documents: the rows of each lane, and iterators that are resumed."""

from __future__ import annotations

import json

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
from grain import checkpoint as grain_checkpoint

from fla_jax.data import BinIdxWriter, JsonLines, gather_state, open_binidx, pack_documents
from fla_jax.data import documents as documents_module
from fla_jax.training import TrainingCheckpoints

LENGTHS = [5, 1, 12, 3, 8, 1, 40, 9, 16, 4, 7]


def documents(lengths=LENGTHS, end=0):
    rng = np.random.default_rng(0)
    return [np.array([*rng.integers(1, 24, n - 1), end]) for n in lengths]


def lane(chosen, length, end_token):
    """Everything in one lane, token by token, in rows; behind the end mask 0."""
    flat = []  # token, label, number of the document, whether it is not the document's first
    for number, document in enumerate(chosen):
        inputs = document[:-1] if end_token is None else [end_token, *document[:-1]]
        labels = document[1:] if end_token is None else document
        flat += [(*pair, number, i > 0) for i, pair in enumerate(zip(inputs, labels, strict=True))]
    return [flat[i : i + length] for i in range(0, len(flat), length)]


@pytest.mark.parametrize("end_token", [0, None])
@pytest.mark.parametrize("length, size", [(8, 3), (1, 1), (64, 2)])
def test_rows(length, size, end_token):
    found = documents()
    source = grain.MapDataset.source(found)
    options = dict(length=length, size=size, end_token=end_token, vocab_size=24)
    got = list(pack_documents(source, carry_state=True, **options))
    want = [lane(found[b::size], length, end_token) for b in range(size)]
    assert len(got) == max(map(len, want))
    for i, batch in enumerate(got):
        assert {x.shape for name, x in batch.items() if name != "continues"} == {(size, length)}
        for b in range(size):
            row = want[b][i] if i < len(want[b]) else []
            n, numbers = len(row), sorted({number for _, _, number, _ in row})
            assert [(*x, True) for x in zip(*(batch[name][b, :n] for name in ("tokens", "labels")))] == [
                (token, label, True) for token, label, _, _ in row
            ]
            assert batch["segment_ids"][b, :n].tolist() == [numbers.index(number) for *_, number, _ in row]
            assert batch["mask"][b].tolist() == [1.0] * n + [0.0] * (length - n)
            assert bool(batch["continues"][b]) == (n > 0 and row[0][3])
    for plain, batch in zip(pack_documents(source, **options), got, strict=True):
        np.testing.assert_equal(plain, {name: x for name, x in batch.items() if name != "continues"})
    if size > 1:
        part = list(pack_documents(source, carry_state=True, part=[1], **options))
        for half, batch in zip(part, got, strict=False):
            np.testing.assert_equal(half, {name: x[1:2] for name, x in batch.items()})


@pytest.fixture
def mixed(tmp_path):
    """Two streams, mixed three to one, of documents that name their stream; short ones are left out."""
    for name in "ab":
        texts = [json.dumps({"text": name * (3 + i % 9)}) for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))

    def make(seed):
        streams = [grain.MapDataset.source(JsonLines(tmp_path / f"{name}.jsonl")) for name in "ab"]
        streams = [stream.shuffle(seed=seed).repeat() for stream in streams]
        mixed = grain.MapDataset.mix(streams, weights=[0.75, 0.25]).filter(lambda x: len(x["text"]) > 4)
        tokens = mixed.map(lambda x: np.frombuffer(x["text"].encode() + b"\0", np.uint8))
        return iter(pack_documents(tokens, 16, 4, carry_state=True))

    return make


def test_mixing_and_shuffling(mixed):
    iterator = mixed(0)
    batches = [next(iterator)["labels"] for _ in range(200)]
    counts = [np.sum([(batch == ord(name)).sum() for batch in batches]) for name in "ab"]
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.1)
    assert not np.array_equal(next(mixed(1))["labels"], batches[0])


def test_resuming(mixed, tmp_path):
    """From JSON, this library's checkpoints and grain's own, after every batch."""
    iterator, states, want = mixed(0), [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(iterator.get_state())))
        want.append(next(iterator))
    for i, state in enumerate(states):
        resumed = mixed(0)
        resumed.set_state(state)
        np.testing.assert_equal([next(resumed) for _ in range(12 - i)], want[i:])
    half = mixed(0)
    for _ in range(5):
        next(half)
    with TrainingCheckpoints(tmp_path / "ours") as checkpoints:
        checkpoints.save(5, {"x": np.ones(1)}, half.get_state())
        ours = mixed(0)
        ours.set_state(checkpoints.restore({"x": np.ones(1)})[1])
    with ocp.Checkpointer(grain_checkpoint.CheckpointHandler()) as saver:
        saver.save(tmp_path / "grain", args=grain_checkpoint.CheckpointSave(half))
        theirs = saver.restore(tmp_path / "grain", args=grain_checkpoint.CheckpointRestore(mixed(0)))
    for resumed in (ours, theirs):
        np.testing.assert_equal([next(resumed) for _ in range(7)], want[5:])
    with pytest.raises(ValueError, match="state must be of 4 rows of a batch, got one of 1"):
        ours.set_state({"document": [0], "offset": [0]})
    for wrong in (
        {"next_index": 3},
        {"document": [0, 1, 2, 3], "offset": [0]},
        {"document": [-4], "offset": [0]},
    ):
        with pytest.raises(ValueError, match=r"state must be what get_state returned, got \{'"):
            ours.set_state(wrong)


@pytest.mark.parametrize("length", [5, 20, 33])
def test_a_state_of_other_documents(length):
    """The first document had 39 tokens, of which two rows took 32; it has fewer now."""
    sources = [[np.arange(1, n), *[np.full(30, 7)] * 2] for n in (40, length)]
    old, new = (iter(pack_documents(grain.MapDataset.source(one), 16, 1)) for one in sources)
    next(old), next(old)
    new.set_state(old.get_state())
    message = f"that at index 0 has {length - 1} labels, and the state goes on behind 32 of them"
    with pytest.raises(ValueError, match=message):
        next(new)


def test_documents_without_labels(monkeypatch):
    """Endlessly many of them are an error, also where only one row of a batch has no others."""
    monkeypatch.setattr(documents_module, "_MOST_EMPTY", 50)
    texts = grain.MapDataset.source([np.array([1, 2, 3]), np.array([4])]).repeat()
    message = r"documents must have labels: 50 of row 1 of a batch, .* index 99"
    with pytest.raises(ValueError, match=message):
        next(iter(pack_documents(texts.filter(lambda x: len(x) > 1), 4, 2)))
    with pytest.raises(ValueError, match="documents must have labels"):
        next(iter(pack_documents(grain.MapDataset.source([np.array([5])]).repeat(), 4, 1, end_token=None)))
    few = grain.MapDataset.source([np.array([5])] * 40 + [np.array([1, 2])])
    assert next(iter(pack_documents(few, 4, 1, end_token=None)))["labels"].tolist() == [[2, 0, 0, 0]]


def test_the_place_of_a_whole_batch():
    """Iterators of any parts continue from it; it is gathered without losing digits."""
    source = grain.MapDataset.source(documents()).repeat()
    make = lambda part: iter(pack_documents(source, 8, 4, part=part))
    whole = make(None)
    for _ in range(5):
        next(whole)
    place, want = whole.get_state(), [next(whole) for _ in range(3)]
    assert gather_state(place, 4, slice(None)) == place
    for part in ([2, 3], [0], [1, 3], [3, 1], [2, 0, 3, 1]):
        half = make(part)
        half.set_state(place)
        got = half.get_state()
        assert got == {name: [x[b] for b in part] for name, x in place.items()}
        for batch in want:
            np.testing.assert_equal(next(half), {name: x[part] for name, x in batch.items()})
        own = half.get_state()
        after = next(half)
        half.set_state(own)
        np.testing.assert_equal(next(half), after)
    with pytest.raises(ValueError, match=r"state must be of the rows \[0, 2\] of a batch, got none of row 2"):
        make([0, 2]).set_state({"document": [4, 5], "offset": [0, 0]})
    big = {"document": [2**40 + 3, 5], "offset": [1, 2**33 + 1]}
    assert gather_state(big, 2, [1, 0]) == {name: x[::-1] for name, x in big.items()}


def test_a_source_of_binidx(tmp_path):
    with BinIdxWriter(tmp_path / "d") as writer:
        for document in documents():
            writer.add(document)
    source = grain.MapDataset.source(open_binidx(tmp_path / "d"))
    for got, want in zip(
        pack_documents(source, 8, 2), pack_documents(grain.MapDataset.source(documents()), 8, 2)
    ):
        np.testing.assert_equal(got, want)


def test_refusals():
    source = grain.MapDataset.source([np.array([1, 30, 0])])
    for arguments, options, error, message in (
        (([np.ones(3, int)], 8, 2), {}, TypeError, "documents must be a grain.MapDataset, got list"),
        ((source, 0, 2), {}, ValueError, "length must be an integer >= 1, got 0"),
        ((source, 8, 0), {}, ValueError, "size must be an integer >= 1, got 0"),
        ((source, 8, 2), {"end_token": -1}, ValueError, "end_token must be an integer >= 0, got -1"),
        (
            (source, 8, 2),
            {"end_token": 31, "vocab_size": 31},
            ValueError,
            "end_token must be .* 0 to 30, got 31",
        ),
        ((source, 8, 2), {"vocab_size": 24}, ValueError, "tokens from 0 to 23, got 30 at index 0"),
        ((source.map(lambda x: x / 2), 8, 1), {}, TypeError, r"arrays of integers \[n\], got float64 \[3\]"),
    ):
        with pytest.raises(error, match=message):
            next(iter(pack_documents(*arguments, **options)))
