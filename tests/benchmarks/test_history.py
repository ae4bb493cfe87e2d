"""The history of measurements: lines are only added, and slower commits are found."""

from __future__ import annotations

import ast
import graphlib
import json

import pytest


@pytest.fixture
def history(module):
    return module("history")


@pytest.fixture
def records(module):
    return module("records")


def record(ms, commit="aaaaaaa", run="2026-01-01T00:00:00+00:00", **other):
    row = {"op": "chunk_rwkv7", "shape": [1, 2, 3, 4, 4], "pass": "fwd", "implementation": "triton", "ms": ms}
    return {**row, "library": "fla_jax", "commit": commit, "run": run, "device": "Some GPU", **other}


def test_writing_results_adds_to_the_history(records, tmp_path):
    """Old lines stay byte for byte; nothing is kept twice, whatever a later record says of peers."""
    path = tmp_path / "some-gpu.json"
    records.write(path, [record(1.0)])
    first = records.history_of(path).read_bytes()
    records.write(path, [record(1.0, ratio=0.5, peer="other", peer_ms=2.0), record(2.0, "bbbbbbb")])
    records.write(path, [record(2.0, "bbbbbbb"), {"op": "chunk_rwkv7", "skipped": "no memory"}])
    second = records.history_of(path).read_bytes()
    assert second.startswith(first) and len(second.splitlines()) == 2
    assert [json.loads(line)["ms"] for line in second.splitlines()] == [1.0, 2.0]
    assert len(records.read(path)) == 2


@pytest.mark.parametrize(
    "ms, options, status",
    [
        (1.049, (), 0),
        (1.051, (), 1),
        (0.5, (), 0),
        (1.03, ("--tolerance", "2"), 1),
        (1.09, ("--tolerance", "10"), 0),
    ],
)
def test_compare_fails_beyond_the_tolerance(history, records, tmp_path, capsys, ms, options, status):
    rows = [record(1.0), record(1.3), record(ms, "bbbbbbb"), record(ms + 1, "bbbbbbb")]
    rows += [record(9.0, "bbbbbbb", dtype="float32"), record(0.1, "aaaaaaa+changes")]
    records.add_to_history(tmp_path / "some-gpu.history.jsonl", rows)
    arguments = ["--results", str(tmp_path), "compare", "aaaaaaa", "bbbb", *options]
    assert history.main(arguments) == status
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1, "only what both commits measured"
    assert ("SLOWER" in out) == bool(status) and f"{ms:.3f}" in out


def test_nothing_in_common_is_an_error(history, records, tmp_path, capsys):
    records.add_to_history(tmp_path / "some-gpu.history.jsonl", [record(1.0)])
    assert history.main(["--results", str(tmp_path), "compare", "aaaaaaa", "ccccccc"]) == 2
    assert "none in common" in capsys.readouterr().err


def test_results_and_history_agree(records):
    """No result was written past the history."""
    for path in sorted(records.RESULTS.glob("*.json")):
        known = {(records.measurement(r), r["run"]) for r in records.read_history(records.history_of(path))}
        results = [r for r in records.read(path) if "ms" in r]
        assert results and all((records.measurement(r), r["run"]) in known for r in results)


def test_modules_import_each_other_in_one_order(records):
    folder = records.ROOT / "benchmarks"
    name_of = lambda path: ".".join(path.relative_to(folder).with_suffix("").parts)
    trees = {name_of(path): ast.parse(path.read_text()) for path in folder.rglob("*.py")}

    def imports(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))

    graphlib.TopologicalSorter(
        {name: trees.keys() & set(imports(tree)) for name, tree in trees.items()}
    ).prepare()
