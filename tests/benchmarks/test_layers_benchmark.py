"""The benchmark of the fused pieces with tiny shapes: it runs on a CPU, its records are whole and merged."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

FIELDS = {"op", "form", "implementation", "library", "shape", "dtype", "pass", "ms", "gbs", "of_copy"}
FIELDS |= {"copy_gbs", "copy", "ratio", "versions", "commit", "device", "run"}


def test_quick_writes_whole_records(tmp_path, command):
    path, other = tmp_path / "cpu.json", {"op": "train_step", "ms": 1.0}
    path.write_text(json.dumps([other]))
    text = command("layers.py", "--quick", "--only", "rwkv7 feed|scanned|rwkv6_readout|head", "--out", path)
    first, *found = json.loads(path.read_text())
    assert first == other
    passes = {(r["form"], r["pass"]) for r in found}
    forms = ("rwkv7 feed-forward", "rwkv7 attention, layers scanned", "rwkv6 attention")
    assert passes == {(form, one) for form in forms for one in ("fwd", "bwd")} | {
        ("head and loss, 32000 tokens", one) for one in ("fwd", "fwd+bwd")
    }
    assert all(r.keys() >= FIELDS and r["ms"] > 0 and r["of_copy"] > 0 for r in found)
    assert all(("tflops" in r) == r["form"].startswith("head") for r in found)
    assert "skipped: norm_shift_mix rwkv7 feed-forward FLA: package fla is not installed" in text


def test_bytes_and_ratios(module):
    """Six mixes read x and y and write x + y and six arrays; a ratio is our time over the fastest peer's."""
    layers, piece = module("layers"), module("pieces.piece")
    moved = piece.piece_of("norm_shift_mix rwkv7 attention").moved((8, 4096, 1024), 2)
    assert moved == {"fwd": 9 * 2 * 8 * 4096 * 1024, "bwd": 9 * 2 * 8 * 4096 * 1024}
    base = {"op": "o", "form": "f", "shape": [1, 2, 3], "pass": "fwd", "dtype": "bfloat16", "ratio": None}
    rows = [{**base, "library": name, "ms": ms} for name, ms in (("fla_jax", 1.0), ("FLA", 4.0), ("b", 2.0))]
    layers.compare(rows)
    assert [r["ratio"] for r in rows] == [0.5, None, None]


def test_peers_come_shape_by_shape(module, monkeypatch):
    """Every core compiles a share of what they tune before one process times them; a run that ends early has
    all pieces at one shape, not one piece at all.
    """
    layers, piece = module("layers"), module("pieces.piece")
    started, settings = [], []

    class Process(module("runner").Process):
        def __init__(self, work, name, jobs, given, **more):
            started.append([(job["piece"], job["shape"]) for job in jobs])
            settings.append(given["shares"])
            super().__init__(work, name, [], given, **more)

    monkeypatch.setattr(layers.runner, "Process", Process)
    monkeypatch.setattr(layers.runner, "is_importable", lambda name: True)
    monkeypatch.setattr(layers.os, "cpu_count", lambda: 2)
    some = [
        piece.piece_of(label) for label in ("rwkv7_readout rwkv7 attention", "rwkv6_readout rwkv6 attention")
    ]
    shapes, skipped = ((1, 2, 64), (2, 2, 64)), []
    options = layers.parse(["--timeout", "20", "--compile-seconds", "20"])
    jobs = [(one, shape) for one in some for shape in shapes]
    assert list(layers.measure_peers(jobs, options, {"dtype": "bfloat16"}, skipped)) == []
    assert settings == [(0, 2), (1, 2), None]
    assert started == [[(one.label, shape) for shape in shapes for one in some]] * 3
    assert len(skipped) == 4


def test_tables_of_launches_are_put_back(module):
    """What the sweep replaces is there again, whatever happens in between."""
    launches, piece = module("pieces.launches"), module("pieces.piece")
    one = piece.piece_of("norm_shift_mix rwkv7 attention")
    options = launches.options(one, (1, 8, 1024), "bwd", quick=True)
    tables = [table for option in options for table, _, _ in option.entries]
    before = [dict(table) for table in tables]
    for option in options:
        with pytest.raises(ZeroDivisionError), launches.taken(option):
            assert all(table.get(key) == value for table, key, value in option.entries)
            raise ZeroDivisionError
    assert options and [dict(table) for table in tables] == before
    assert launches.options(piece.piece_of("rwkv7_keys rwkv7 attention"), (1, 8, 1024), "fwd", quick=True)
