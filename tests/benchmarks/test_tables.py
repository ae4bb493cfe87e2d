"""The tables of the pages are drawn from the records, in whatever order a run has left these."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASKED_FOR = sorted(
    {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"^\{\{ table (\w+) \}\}$", page.read_text(), re.MULTILINE)
    }
)


@pytest.fixture
def tables(monkeypatch, module):
    """docs/tables.py as the site's build finds it: beside the benchmarks' modules."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield module("tables")
    del sys.modules["tables"]


def test_every_table_is_asked_for(tables):
    assert sorted(tables.TABLES) == ASKED_FOR


@pytest.mark.parametrize("name", ASKED_FOR)
@pytest.mark.parametrize("order", [1, -1])
def test_every_order_of_the_records_is_drawn(tables, monkeypatch, name, order):
    """The committed records give every page's table; rows of peers and of whole models lack some names."""
    found = {device: rows[::order] for device, rows in tables.results().items()}
    assert found and all(found.values())
    monkeypatch.setattr(tables, "results", lambda: found)
    drawn = tables.TABLES[name]()
    assert "None in this file" not in drawn and all(device in drawn for device in found)


def test_what_is_drawn_is_what_was_recorded(tables):
    """A row by hand: its sizes, its time and the peer that was slower."""
    row = {"op": "chunk_rwkv7", "form": "chunk", "shape": [8, 4096, 64, 64, 64], "dtype": "bfloat16"}
    row |= {"library": "fla_jax", "implementation": "triton", "decay": "bounded", "pass": "fwd+bwd"}
    row |= {"ms": 3.1234, "peak_gb": 3.94, "peer": "other", "peer_ms": 8.336, "ratio": 3.1234 / 8.336}
    line = tables.recurrences([row]).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "`chunk_rwkv7`, triton" and cells[1:4] == ["8 4096 64 64", "bounded", "fwd+bwd"]
    assert cells[4:] == ["3.12", "other 8.34", "0.37", "3.94"]
    assert "other 8.34" not in tables.losses([row])
    assert "other 3 ms" in tables.losses([row | {"peer_ms": 3.0, "ratio": 3.1234 / 3.0}])
