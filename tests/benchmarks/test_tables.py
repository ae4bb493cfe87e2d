"""The tables of the pages are drawn from the records, in whatever order a run has left these."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "benchmarks" / "results" / "experiments.jsonl"
REQUESTED = sorted(
    {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"^<!-- table (\w+) -->$", page.read_text(), re.MULTILINE)
    }
)


@pytest.fixture
def tables(monkeypatch, module):
    """docs/tables.py as the site's build finds it, beside the benchmarks' modules."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield module("tables")
    del sys.modules["tables"]


def test_every_table_is_requested(tables):
    assert sorted(tables.TABLES) == REQUESTED


@pytest.mark.parametrize("name", REQUESTED)
@pytest.mark.parametrize("order", [1, -1])
def test_every_order_of_the_records_is_drawn(tables, monkeypatch, name, order):
    """The committed records give every table; records of peers and of whole models lack some fields."""
    found = {device: records[::order] for device, records in tables.results().items()}
    assert found and all(found.values())
    monkeypatch.setattr(tables, "results", lambda: found)
    drawn = tables.TABLES[name]()
    assert tables.NOTHING not in drawn
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    measured = {"losses": {h200}, "peers": {h200}, "layers": {h200}, "counters": {h100}, "tasks": set()}
    on = measured.get(name, {h100, h200})
    assert name == "experiments" or {device for device in found if device in drawn} == on


def test_a_record_is_drawn_with_its_numbers(tables):
    """A line by hand: its sizes, its time and the peer that was slower."""
    record = {"op": "chunk_rwkv7", "form": "chunk", "shape": [8, 4096, 64, 64, 64], "dtype": "bfloat16"}
    record |= {"library": "fla_jax", "implementation": "triton", "decay": "bounded", "pass": "fwd+bwd"}
    record |= {"ms": 3.1234, "peak_gb": 3.94, "peer": "other", "peer_ms": 8.336, "ratio": 3.1234 / 8.336}
    cells = [cell.strip() for cell in tables.recurrences([record]).splitlines()[-1].strip("|").split("|")]
    assert cells[0] == "`chunk_rwkv7`, triton" and cells[1:4] == ["8 4096 64 64", "safe gate", "fwd+bwd"]
    assert cells[4:] == ["3.12", "other 8.34", "0.37", "3.94"]
    other = record | {"library": "other", "implementation": "other"}
    assert "other 8.34" not in tables.losses([record, other])
    assert "other 3 ms" in tables.losses([record | {"peer_ms": 3.0, "ratio": 3.1234 / 3.0}, other])
    assert tables.losses([record]) == tables.NOTHING, "no peer was measured"
    assert "not measured" in tables.recurrences([record | {"ratio": None}])


def test_tasks(tables):
    """Models side by side, the best record of each, recall before groups, lengths and layers ascending."""

    def record(task, model, length, pairs, width, layers, accuracy):
        sizes = {"task": task, "length": length, "pairs": pairs, "hidden_size": width, "num_layers": layers}
        shares = {"accuracy": accuracy, "sequences": accuracy / 2, "steps": 500}
        return {"op": "task", "implementation": model, "shape": sizes, **shares}

    shifted = record("recall", "rwkv7", 512, 64, 64, 2, 0.5)
    shifted["shape"] |= {"curriculum": [32, 8], "decay_shift": -6.0}
    found = [
        record("A5", "rwkv7", 8, 0, 128, 2, 1.0),
        shifted,
        record("recall", "rwkv7", 64, 4, 128, 2, 0.75),
        record("recall", "rwkv7", 64, 4, 64, 2, 0.25),
        record("recall", "rwkv7", 64, 4, 64, 2, 0.125),
        record("recall", "rwkv6", 64, 4, 64, 2, 0.2),
        {"op": "decode", "ms": 1.0},
    ]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in tables.tasks(found).splitlines()
    ]
    assert [line[:3] for line in lines[2:]] == [
        ["recall", "64, 4 pairs", "64 x 2"],
        ["recall", "64, 4 pairs", "128 x 2"],
        ["recall", "512, 64 pairs", "64 x 2"],
        ["A5", "8", "128 x 2"],
    ]
    assert lines[2][3:] == ["20.0% (10.0%), 500 steps", "25.0% (12.5%), 500 steps"]
    assert lines[3][3:] == ["not measured", "75.0% (37.5%), 500 steps"]
    assert lines[4][4] == "50.0% (25.0%), 500 steps, curriculum 1/32, 1/8, decay shift -6"
    assert tables.tasks([{"op": "decode", "ms": 1.0}]) == tables.NOTHING


def test_experiments_have_their_form(tables):
    """Each line is one variant: equal fields, numbers or null, a unit, and no line twice."""
    lines = EXPERIMENTS.read_text().splitlines()
    assert len(lines) > 200 and len(set(lines)) == len(lines)
    for line in lines:
        row = json.loads(line)
        assert list(row) == [
            "date",
            "commit",
            "kernel",
            "shape",
            "change",
            "before",
            "after",
            "unit",
            "taken",
        ], line
        assert all(isinstance(row[name], str) and row[name] for name in ("kernel", "change", "unit")), line
        assert all(row[name] is None or isinstance(row[name], str) for name in ("date", "commit", "shape")), (
            line
        )
        assert all(row[name] is None or type(row[name]) in (int, float) for name in ("before", "after")), line
        assert row["taken"] in (True, False, None), line
        assert row["date"] is None or re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), line
        assert row["commit"] is None or re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]), line
    drawn = tables.experiments()
    heads = drawn.count("\n| variant |") + drawn.count("\n| --- |")
    assert drawn.count("\n| ") - heads == len(lines), "each line is drawn"
