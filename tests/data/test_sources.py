"""JSON Lines and Parquet by index, against the files read whole."""

from __future__ import annotations

import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fla_jax.data import JsonLines, ParquetRows, sources


@pytest.fixture
def lines(tmp_path):
    """Two files with empty lines, ends of lines of both kinds, and a last line without one."""
    values = [{"text": "é" * n, "n": n} for n in (0, 3, 40, 1, 7)]
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    (tmp_path / "a.jsonl").write_bytes(f"{texts[0]}\n\n{texts[1]}\r\n\r\n{texts[2]}".encode())
    (tmp_path / "b.jsonl").write_bytes(f"\n{texts[3]}\n{texts[4]}\n".encode())
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], values


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_json_lines(lines, block, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", block)
    paths, values = lines
    source = JsonLines(paths)
    assert [source[i] for i in range(len(source))] == values
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.__getitem__, [4, 0, 2, 2, 1, 3] * 9)) == [
            values[i] for i in [4, 0, 2, 2, 1, 3] * 9
        ]
    assert pickle.loads(pickle.dumps(source))[2] == values[2]
    assert len(JsonLines(paths[0])) == 3


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_lines_of_spaces_are_no_documents(tmp_path, block, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", block)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b' \t\n{"n": 0}\n   \n\n  {"n": 1}  \r\n \r\n\t{"n": 2}\n{}')
    source = JsonLines(path)
    assert [source[i] for i in range(len(source))] == [{"n": 0}, {"n": 1}, {"n": 2}, {}]
    for empty in (b"", b"   ", b" \n \n"):
        path.write_bytes(empty)
        with pytest.raises(ValueError, match="paths must contain a document"):
            JsonLines(path)


def test_json_lines_that_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, message in (
        (b"not json", "the line at offset 11 is not JSON: "),
        (b"[1, 2]", "the line at offset 11 must be a JSON object"),
        (b'{"x": "\xff"}', "is not UTF-8 at offset 18"),
        (b'{"x": ' + b"9" * 5000 + b"}", "the line at offset 11 is not JSON: "),
        (b"[" * 200_000, "the line at offset 11 is not JSON: "),
    ):
        path.write_bytes(b'{"x": "y"}\n' + line)
        source = JsonLines(path)
        assert source[0] == {"x": "y"}
        with pytest.raises(ValueError, match=re.escape(f"{path}") + ".*" + message):
            source[1]
    with pytest.raises(IndexError, match="document 2 of 2"):
        source[2]
    with pytest.raises(ValueError, match="index must be an integer >= 0, got -1"):
        source[-1]
    path.write_bytes(b"\xef\xbb\xbf" + b'{"x": 1}\n{"x": 2}\n')
    assert [*JsonLines(path)] == [{"x": 1}, {"x": 2}]
    path.write_bytes(b"\n\n")
    with pytest.raises(ValueError, match="paths must contain a document, got 1 files without any"):
        JsonLines(path)
    with pytest.raises(ValueError, match="paths must contain a document, got 0 files without any"):
        JsonLines([])
    with pytest.raises(ValueError, match="must be a regular file, got a directory"):
        JsonLines(tmp_path)


def test_parquet_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'fla-jax[data]')")
    from pyarrow import parquet

    values = [{"text": f"document {i}", "n": i} for i in range(23)]
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, rows in zip(paths, (values[:10], values[10:]), strict=True):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    source = ParquetRows(paths, cached_groups=2)
    order = np.random.default_rng(0).permutation(23)
    assert [source[i] for i in order] == [values[i] for i in order]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.__getitem__, order)) == [values[i] for i in order]
    assert len(source._cache) == 2
    copy = pickle.loads(pickle.dumps(source))
    assert not copy._cache and copy[22] == values[22]
    assert ParquetRows(paths[1], ["n"])[0] == {"n": 10}
    assert [*source] == values
    with pytest.raises(TypeError, match="columns must be a sequence of names, got the string 'text'"):
        ParquetRows(tmp_path / "a.parquet", columns="text")
    with pytest.raises(ValueError, match=r"columns must be of text, n in .*a\.parquet, got 'url'"):
        ParquetRows(paths, ["url"])
    parquet.write_table(pyarrow.table({"n": pyarrow.array([], "int64")}), paths[0])
    with pytest.raises(ValueError, match="paths must contain a row, got 1 files without any"):
        ParquetRows(paths[:1])
    paths[0].write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is no Parquet file: "):
        ParquetRows(paths)
