"""The README's Python runs as it is written, its links lead somewhere, its numbers are those of records."""

from __future__ import annotations

import json
import re

import blocks
import jax
import pytest

TEXT = (blocks.ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.once
def test_python():
    names = blocks.run("README.md")
    assert names["o2"].shape == (2, 1024, 4, 64) and [len(row) for row in names["rows"]] == [20]
    assert isinstance(names["logits"], jax.Array)


def test_it_is_one_screen_and_its_links_lead_somewhere():
    assert len(TEXT.splitlines()) < 100
    targets = re.findall(r"\]\(([^)#]+)(?:#([\w-]+))?\)", TEXT)
    assert len(targets) > 15
    for path, heading in targets:
        assert (blocks.ROOT / path).exists(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", (blocks.ROOT / path).read_text(), re.MULTILINE)
            assert heading in [title.lower().replace(" ", "-") for title in titles], (path, heading)


def test_its_numbers_are_those_of_records():
    """Every time in its table is that of a record of the results file, at the digits that are shown."""
    rows = json.loads((blocks.ROOT / "benchmarks" / "results" / "nvidia-h200.json").read_text())
    times = [row["ms"] for row in rows if "ms" in row]
    lines = [line for line in TEXT.splitlines() if re.match(r"\| (RWKV|training)", line)]
    assert len(lines) == 5
    for line in lines:
        _, _, ours, peer, ratio, _ = (cell.strip() for cell in line.split("|"))
        mine, theirs = re.search(r"^[\d.]+", ours)[0], re.search(r"[\d.]+", peer.replace("wind_rwkv", ""))[0]
        for shown in (mine, theirs, *re.findall(r"\d+\.\d+", ours)):
            digits = len(shown.partition(".")[2])
            assert any(f"{ms:.{digits}f}" == shown for ms in times), (line, shown)
        assert float(ratio) == pytest.approx(float(mine) / float(theirs), abs=0.01)
