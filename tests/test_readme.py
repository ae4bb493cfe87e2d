"""The README's Python runs as it is written, its links lead somewhere, its numbers are those of records."""

from __future__ import annotations

import json
import re

import blocks
import jax
import pytest

TEXT = (blocks.ROOT / "README.md").read_text()
RECORDS = json.loads((blocks.ROOT / "benchmarks" / "results" / "nvidia-h200.json").read_text())


@pytest.mark.slow
@pytest.mark.one_python
def test_python():
    names = blocks.run("README.md")
    assert names["o2"].shape == (2, 1024, 4, 64) and [len(tokens) for tokens in names["outputs"]] == [20]
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


def record(**settings):
    """The one record of an H200 with these settings."""
    found = [row for row in RECORDS if "ms" in row and settings.items() <= row.items()]
    assert len(found) == 1, (settings, len(found))
    assert found[0]["device"] == "NVIDIA H200"
    return found[0]


def ours(op, shape, decay, implementation):
    settings = {
        "op": op,
        "shape": [*shape, shape[-1]],
        "decay": decay,
        "dtype": "bfloat16",
        "pass": "fwd+bwd",
    }
    return record(**settings, library="fla_jax", implementation=implementation)


def best_peer(row):
    """The fastest record of another library for the same call, which must be of the same run."""
    call = {name: row[name] for name in ("op", "form", "shape", "decay", "dtype", "pass")}
    peers = [r for r in RECORDS if "ms" in r and r.get("library") != "fla_jax" and call.items() <= r.items()]
    best = min(peers, key=lambda peer: peer["ms"])
    assert (best["run"], best["commit"], best["device"]) == (row["run"], row["commit"], row["device"])
    assert (best["implementation"], best["ms"]) == (row["peer"], row["peer_ms"])
    return best


def table():
    """The lines of the README's table, made of the record that each number belongs to."""
    rows = []

    def add(call, mine, text, name, digits, theirs, note=""):
        assert name.partition(" ")[0].lower() in theirs["implementation"].lower(), theirs["implementation"]
        ratio = mine["ms"] / theirs["ms"]
        rows.append(f"| {call} | {text} | {name} {theirs['ms']:.{digits}f}{note} | {ratio:.2f} |")

    seven = lambda decay, shape: ours("chunk_rwkv7", shape, decay, "triton")
    decays = ("bounded", "any-weak", "any-strong")
    mine, weak, strong = (seven(decay, (8, 4096, 64, 64)) for decay in decays)
    text = f"{mine['ms']:.2f} (without `lower_bound`: {weak['ms']:.2f}, strong decays {strong['ms']:.2f})"
    add("RWKV-7, 8 4096 64 64", mine, text, "wind_rwkv", 2, best_peer(mine))

    mine, strong = (seven(decay, (4, 8192, 32, 128)) for decay in ("bounded", "any-strong"))
    text = f"{mine['ms']:.2f} (without `lower_bound`, strong decays: {strong['ms']:.2f})"
    add("RWKV-7, 4 8192 32 128", mine, text, "wind_rwkv", 1, best_peer(mine))

    mine = ours("chunk_rwkv6", (8, 4096, 64, 64), "any-strong", "triton")
    add("RWKV-6, 8 4096 64 64, strong decays", mine, f"{mine['ms']:.2f}", "FLA", 1, best_peer(mine))

    mine = ours("fused_recurrent_rwkv7", (8, 4096, 64, 64), "any-weak", "pallas")
    text, theirs = f"{mine['ms']:.1f} (without `lower_bound`)", best_peer(mine)
    assert "needs w >= about -0.6" in theirs["note"] and "backstepping" in theirs["implementation"]
    note = " (decays above e^-0.6)"
    call = "RWKV-7 token by token, 8 4096 64 64"
    add(call, mine, text, "wind_rwkv backstepping", 1, theirs, note)

    size = {"layers": 24, "width": 1024, "tokens": 4096, "batch": 8, "vocab": 32000}
    step = {"op": "train_step", "model": "rwkv7", "shape": size, "dtype": "bfloat16"}
    step |= {"pass": "forward + backward + optimizer"}
    mine, dense = (
        record(**step, implementation="fla_jax", scan="unroll", remat=remat) for remat in ("none", "dense")
    )
    theirs = record(**step, implementation="rwkv-lm", remat="none")
    assert mine["run"] == dense["run"] == theirs["run"] and theirs["precision"] == "bf16"
    text = (
        f'{mine["ms"]:.0f}, {mine["peak_gb"]:.0f} GB (`remat="dense"`: {dense["ms"]:.0f}, '
        f'{dense["peak_gb"]:.0f} GB), float32 parameters, `scan_layers="unroll"`'
    )
    note = f", {theirs['peak_gb']:.0f} GB, bfloat16 parameters"
    add("training step, 24 x 1024, B 8, T 4096", mine, text, "RWKV-LM", 0, theirs, note)

    model = {"version": 7, "model": "24x2048", "batch": 1, "weights": "bfloat16", "state": "float32"}
    mine = record(op="decode", library="fla_jax", implementation="triton", **model)
    text = f"{mine['ms_per_token']:.2f} (a copy of its bytes: {mine['floor_ms']:.2f})"
    rows.append(f"| a decoded token, RWKV-7 24 x 2048, batch 1 | {text} | | |")
    return rows


def test_its_numbers_are_those_of_their_records():
    """Each line is that of its call: op, shape, decays, implementation, peer, device and run."""
    lines = TEXT.splitlines()
    start = lines.index("| B T H D | ours | best peer of the run | ratio |") + 2
    assert lines[start : lines.index("", start)] == table()
