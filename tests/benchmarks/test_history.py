"""The history of measurements: lines are only added, and what became slower is found."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def history(module):
    return module("history")


def record(ms, commit="aaaaaaa", run="2026-01-01T00:00:00+00:00", **other):
    """What a benchmark would write."""
    row = {"op": "chunk_rwkv7", "shape": [1, 2, 3, 4, 4], "pass": "fwd", "implementation": "triton", "ms": ms}
    return {**row, "library": "fla_jax", "commit": commit, "run": run, "device": "Some GPU", **other}


def test_writing_results_adds_to_the_history(history, tmp_path):
    """Old lines stay as they are, byte for byte; nothing is kept twice, whatever is said of peers later."""
    import records

    path = tmp_path / "some-gpu.json"
    records.write(path, [record(1.0)])
    first = history.path_of(path).read_bytes()
    records.write(path, [record(1.0, ratio=0.5, peer="other", peer_ms=2.0), record(2.0, "bbbbbbb")])
    records.write(path, [record(2.0, "bbbbbbb"), {"op": "chunk_rwkv7", "skipped": "no memory"}])
    second = history.path_of(path).read_bytes()
    assert second.startswith(first) and len(second.splitlines()) == 2
    assert [json.loads(line)["ms"] for line in second.splitlines()] == [1.0, 2.0]
    assert len(records.read(path)) == 2


@pytest.mark.parametrize("ms, status", [(1.049, 0), (1.051, 1), (0.5, 0)])
def test_compare_fails_beyond_five_percent(history, tmp_path, capsys, ms, status):
    rows = [record(1.0), record(1.3), record(ms, "bbbbbbb"), record(ms + 1, "bbbbbbb")]
    rows += [record(9.0, "bbbbbbb", dtype="float32"), record(0.1, "aaaaaaa+changes")]
    history.add(tmp_path / "some-gpu.history.jsonl", rows)
    assert history.main(["--results", str(tmp_path), "compare", "aaaaaaa", "bbbb"]) == status
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1, "only what both commits measured"
    assert ("SLOWER" in out) == bool(status) and f"{ms:.3f}" in out


def test_nothing_in_common_is_an_error(history, tmp_path, capsys):
    history.add(tmp_path / "some-gpu.history.jsonl", [record(1.0)])
    assert history.main(["--results", str(tmp_path), "compare", "aaaaaaa", "ccccccc"]) == 2
    assert "none in common" in capsys.readouterr().err


def test_the_repository_keeps_what_its_results_say(history):
    """No result was written past the history."""
    import records

    for path in sorted(records.RESULTS.glob("*.json")):
        kept = {(history.key(row), row["run"]) for row in history.read(history.path_of(path))}
        results = [row for row in records.read(path) if "ms" in row]
        assert results and all((history.key(row), row["run"]) in kept for row in results)
