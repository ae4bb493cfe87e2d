"""The README's Python runs as it is written, its links lead somewhere, its numbers are those of records."""

from __future__ import annotations

import json
import re

import blocks
import jax
import numpy as np
import pytest

from fla_jax.checkpoints import save_checkpoint
from fla_jax.generation import load_tokenizer
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM, initial_params

TEXT = (blocks.ROOT / "README.md").read_text()
RECORDS = json.loads((blocks.ROOT / "benchmarks" / "results" / "nvidia-h200.json").read_text())


@pytest.mark.slow
@pytest.mark.one_python
def test_python(tmp_path, monkeypatch):
    """A small model stands for the official file, and bytes for its vocabulary."""
    monkeypatch.chdir(tmp_path)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=65536, hidden_size=64, num_layers=1))
    params = initial_params(model, jax.random.key(0))
    save_checkpoint("RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth", model, params)
    monkeypatch.setattr("fla_jax.generation.load_tokenizer", lambda vocab_size: load_tokenizer("bytes"))
    names = blocks.run("README.md")
    assert np.isfinite(names["loss"]) and len(names["completion"].tokens) == 20


def test_it_is_one_screen_and_its_links_lead_somewhere():
    assert len(TEXT.splitlines()) < 100
    targets = re.findall(r"\]\((?!https:)([^)#]+)(?:#([\w-]+))?\)", TEXT)
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

    mine = ours("fused_recurrent_rwkv7", (8, 4096, 64, 64), "any-weak", "triton")
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


def test_its_picture_shows_the_records():
    """Written by ``python docs/pictures.py docs/assets compared``: the newest times, the fastest first."""
    picture = (blocks.ROOT / "docs" / "assets" / "compared.svg").read_text()
    shown = [float(ms) for ms in re.findall(r">([\d.]+) ms<", picture)]
    ops = [("chunk_rwkv7", "bounded"), ("chunk_rwkv6", "any-strong")]
    want = [ours(op, (8, 4096, 64, 64), decay, "triton") for op, decay in ops]
    want += [best_peer(row) for row in want]
    size = {"layers": 24, "width": 1024, "tokens": 4096, "batch": 8, "vocab": 32000}
    step = {"op": "train_step", "model": "rwkv7", "shape": size, "remat": "none"}
    want += [record(**step, implementation=name) for name in ("fla_jax", "rwkv-lm", "fla")]
    assert {float(f"{row['ms']:.3g}") for row in want} <= set(shown) and len(shown) == 11
