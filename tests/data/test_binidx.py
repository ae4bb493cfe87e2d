"""The binidx format against bytes made by hand with struct, and what is said of files that are not right."""

import struct

import numpy as np
import pytest

from fla_jax.data import BinIdxWriter, open_binidx

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 0]]
CODES = {"uint8": (1, "B"), "int32": (4, "i"), "uint16": (8, "H"), "uint32": (9, "I")}


def index(dtype, lengths, *, entries=None, pointers=None, version=1, magic=b"MMIDIDX\x00\x00", code=None):
    """An .idx file, as its definition says it."""
    size = struct.calcsize(CODES[dtype][1])
    pointers = [sum(lengths[:i]) * size for i in range(len(lengths))] if pointers is None else pointers
    entries = list(range(len(lengths) + 1)) if entries is None else entries
    header = magic + struct.pack("<Q", version) + struct.pack("<B", code or CODES[dtype][0])
    header += struct.pack("<QQ", len(lengths), len(entries))
    n, d = len(lengths), len(entries)
    return header + struct.pack(f"<{n}i{n}q{d}q", *lengths, *pointers, *entries)


def write(folder, dtype="uint16", documents=DOCUMENTS, **options):
    flat = [token for document in documents for token in document]
    (folder / "d.bin").write_bytes(struct.pack(f"<{len(flat)}{CODES[dtype][1]}", *flat))
    (folder / "d.idx").write_bytes(index(dtype, [len(document) for document in documents], **options))
    return folder / "d"


def lists(data):
    return [document.tolist() for document in data]


@pytest.mark.parametrize("dtype", CODES)
def test_reads_bytes_made_by_hand(tmp_path, dtype):
    documents = [*DOCUMENTS, [70_000, 0]] if "32" in dtype else DOCUMENTS
    write(tmp_path, dtype, documents)
    for name in ("d", "d.bin", "d.idx"):
        data = open_binidx(tmp_path / name)
        assert lists(data) == documents and data.tokens.dtype == dtype and len(data) == len(documents)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_writes_the_same_bytes(tmp_path, dtype):
    write(tmp_path, dtype)
    with BinIdxWriter(tmp_path / "new", dtype) as writer:
        writer.add(np.array(DOCUMENTS[0][:2]), ends=False)
        writer.add(DOCUMENTS[0][2:])
        writer.add(DOCUMENTS[1])
        writer.add(DOCUMENTS[2], ends=False)  # the end of the file ends it
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"new{ending}").read_bytes() == (tmp_path / f"d{ending}").read_bytes()


def test_documents_of_several_sequences_and_without_any(tmp_path):
    assert lists(open_binidx(write(tmp_path, entries=[0, 2, 3]))) == [
        DOCUMENTS[0] + DOCUMENTS[1],
        DOCUMENTS[2],
    ]
    for entries in ([], [0]):  # an index without documents
        assert lists(open_binidx(write(tmp_path, entries=entries))) == DOCUMENTS
    empty = [[], [1, 0], [], [2, 0], []]
    assert lists(open_binidx(write(tmp_path, documents=empty))) == empty


@pytest.mark.parametrize(
    "options, message",
    [
        ({"magic": b"TNTIDX\x00\x00\x01"}, r"d\.idx is no binidx index: .* at offset 0"),
        ({"version": 2}, r"d\.idx: the version must be 1, got 2 at offset 9"),
        ({"code": 7}, r"d\.idx: the tokens' dtype must be one of .*uint32\).*, got 7 at offset 17"),
        ({"documents": []}, r"d\.idx contains no sequence: their number is 0 at offset 18"),
        ({"pointers": [0, 8, 11]}, r"sequence 2 must begin .* at byte 12 of d\.bin, got 11 at offset 62"),
        ({"entries": [0, 2, 1, 3]}, r"must ascend from 0 to 3, got 1 at offset 86"),
        ({"entries": [0, 2]}, r"must ascend from 0 to 3, got 2 at offset 78"),
        ({"entries": [1, 3]}, r"must ascend from 0 to 3, got 1 at offset 70"),
        ({"documents": [[], []]}, r"d\.bin contains no tokens"),
    ],
)
def test_foreign_indices_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        open_binidx(write(tmp_path, **options))


def test_files_cut_off_anywhere(tmp_path):
    name = write(tmp_path)
    whole = {ending: (tmp_path / f"d{ending}").read_bytes() for ending in (".bin", ".idx")}
    for ending, content in whole.items():
        path = tmp_path / f"d{ending}"
        for size in range(len(content)):
            path.write_bytes(content[:size])
            at = 0 if ending == ".idx" and size == 0 else size
            with pytest.raises(ValueError, match=rf"d\{ending}.* offset {at}\b"):
                open_binidx(name)
        path.write_bytes(content + b"x")
        with pytest.raises(ValueError, match=rf"d\{ending} goes on at offset {len(content)}"):
            open_binidx(name)
        path.write_bytes(content)
    lengths = bytearray(whole[".idx"])
    lengths[34 + 4 : 34 + 8] = struct.pack("<i", -2)
    (tmp_path / "d.idx").write_bytes(lengths)
    with pytest.raises(ValueError, match=r"a sequence has the length -2 at offset 38"):
        open_binidx(name)
    (tmp_path / "d.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"d\.bin"):
        open_binidx(name)


def test_the_writer_refuses_and_leaves_nothing(tmp_path):
    for tokens in ([70_000], [-1], [1.5], [[1]]):
        with pytest.raises(ValueError, match="tokens must be"), BinIdxWriter(tmp_path / "new") as writer:
            writer.add([1, 2])
            writer.add(tokens)
    assert not list(tmp_path.iterdir())
    with BinIdxWriter(tmp_path / "old") as kept:
        kept.add([3, 4])
    with pytest.raises(ValueError, match="tokens must be"), BinIdxWriter(tmp_path / "old") as writer:
        writer.add([-1])
    assert open_binidx(tmp_path / "old")[0].tolist() == [3, 4]  # what was there stays
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got float32"):
        BinIdxWriter(tmp_path / "new", np.float32)
    for used in (writer, kept):
        with (
            pytest.raises(ValueError, match=r"can be entered once: create another one to write .*old\.bin"),
            used,
        ):
            pytest.fail("entered twice")
    assert open_binidx(tmp_path / "old")[0].tolist() == [3, 4]
    for outside in (writer, BinIdxWriter(tmp_path / "new")):
        with pytest.raises(ValueError, match="inside the writer's with statement only"):
            outside.add([1])
