"""The benchmark of the ops with tiny shapes: it runs on a CPU, and its records are whole, right and merged
with what is there.
"""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

FIELDS = {
    "op",
    "form",
    "implementation",
    "library",
    "shape",
    "dtype",
    "pass",
    "decay",
    "ms",
    "roofline_ms",
    "peak_gb",
    "errors",
    "peer",
    "peer_ms",
    "ratio",
}
FIELDS |= {"versions", "commit", "device", "run", "first_call_s", "note"}


def test_quick_writes_whole_records(tmp_path, command):
    path, other = tmp_path / "cpu.json", {"op": "train_step", "ms": 1.0}
    old = {"op": "chunk_rwkv7", "implementation": "xla", "commit": "another", "ms": 1.0}
    path.write_text(json.dumps([other, old]))
    wanted = "rwkv7 chunk .* bounded (float32 )?ours|rwkv6 decode .*(reference|copy)"
    text = command("ops.py", "--quick", "--no-peers", "--out", path, "--only", wanted)
    found = json.loads(path.read_text())
    assert found[0] == other and old not in found
    found = found[1:]
    assert not [r for r in found if "skipped" in r], text
    assert all(r.keys() >= FIELDS for r in found), [FIELDS - r.keys() for r in found]
    assert {(r["pass"], r["dtype"]) for r in found if r["op"] == "chunk_rwkv7"} == {
        (one, dtype) for one in ("fwd", "fwd+bwd") for dtype in ("bfloat16", "float32")
    }
    assert {(r["op"], r["form"]) for r in found} == {
        ("chunk_rwkv7", "chunk"),
        ("fused_recurrent_rwkv6", "decode"),
    }
    for r in found:
        assert r["ms"] > 0 and r["shape"][3:] == [64, 64]
        if r["library"] == "fla_jax":
            error, gradient = (1e-6, 1e-5) if r["dtype"] == "float32" else (4e-3, 1e-2)
            assert 0 < r["errors"]["o"] < error, r
            assert 0 < r["errors"]["worst_gradient"] < gradient and r["errors"]["dw"] < gradient, r
        if r["form"] == "decode" and r["library"] == "fla_jax":
            assert r["ratio_to_copy"] > 0
    assert "chunk_rwkv7" in text and str(path) in text


def test_missing_peers_are_said(tmp_path, command, module):
    path = tmp_path / "cpu.json"
    path.write_text("[]")
    importable = module("runner").is_importable
    missing = [name for name in ("fla", "wind_rwkv", "jla", "rwkv_ops") if not importable(name)]
    text = command("ops.py", "--quick", "--out", path, "--only", "(wind|FLA|jla|rwkv-ops)")
    assert all(f"package {name} is not installed" in text for name in missing)


def test_roofline_is_the_bytes_that_must_move(module):
    Task, roofline_ms = module("peers.ops").Task, module("recurrences.plan").roofline_ms
    task = Task("chunk_rwkv7", "chunk", (8, 4096, 64, 64, 64), "fwd", "bounded")
    assert roofline_ms(task, "NVIDIA H200") == pytest.approx(0.44, abs=0.01)
    both = Task("chunk_rwkv7", "chunk", (8, 4096, 64, 64, 64), "fwd+bwd", "bounded")
    assert roofline_ms(both, "NVIDIA H200") == pytest.approx(1.26, abs=0.01)
    wide = Task("chunk_rwkv7", "chunk", (8, 4096, 64, 64, 64), "fwd+bwd", "bounded", "float32")
    assert roofline_ms(wide, "NVIDIA H200") == pytest.approx(2.51, abs=0.01)
    assert roofline_ms(task, "another") is None


def test_the_peer_is_the_fastest_with_the_same_decays(module):
    base = {
        "op": "chunk_rwkv7",
        "form": "chunk",
        "shape": [1, 2, 3, 4, 5],
        "dtype": "bfloat16",
        "pass": "fwd",
    }
    row = lambda library, decay, ms, **rest: {
        **base,
        "library": library,
        "implementation": library,
        "decay": decay,
        "ms": ms,
        **rest,
    }
    rows = [
        row("fla_jax", "bounded", 2.0, ms_end=3.0),
        row("a", "bounded", 6.0),
        row("b", "any-weak", 4.0),
        row("c", "any-strong", 1.0),
    ]
    module("recurrences.report").compare(rows)
    assert rows[0]["peer"] == "b" and rows[0]["peer_ms"] == 4.0 and rows[0]["ratio"] == 0.75


@pytest.mark.parametrize("timed, best", [("fwd", "wrong"), ("fwd+bwd", "right")])
def test_what_is_not_finite_is_no_peer(timed, best, module):
    """Of the pass that was timed: gradients that are NaN say nothing against a forward."""
    base = {"op": "chunk_rwkv7", "form": "chunk", "shape": [1, 2, 3, 4, 5], "dtype": "bfloat16"}
    row = lambda library, ms, note=None: (
        base
        | {
            "pass": timed,
            "library": library,
            "implementation": library,
            "decay": "any-strong",
            "ms": ms,
            "note": note,
        }
    )
    rows = [row("fla_jax", 2.0), row("wrong", 3.0, "a note; not finite: dw"), row("right", 4.0, "a note")]
    module("recurrences.report").compare(rows)
    assert rows[0]["peer"] == best
    rows[1]["note"] = "not finite: o, dw; another"
    module("recurrences.report").compare(rows)
    assert rows[0]["peer"] == "right"


def test_the_chart_shows_losses(module, tmp_path):
    pytest.importorskip("matplotlib")
    chart = module("chart")
    base = {
        "op": "chunk_rwkv7",
        "form": "chunk",
        "shape": [1, 2, 3, 4, 5],
        "dtype": "bfloat16",
        "pass": "fwd",
        "decay": "bounded",
        "roofline_ms": 0.5,
    }
    base |= {"device": "cpu", "commit": "0"}
    row = lambda library, ms, ratio: {
        **base,
        "library": library,
        "implementation": library,
        "ms": ms,
        "ratio": ratio,
    }
    rows = [
        row("fla_jax", 2.0, 1.5),
        row("fla_jax", 1.0, 0.8),
        row("fla_jax", 1.0, None),
        row("a", 1.3, None),
    ]
    assert [chart.color(r) for r in rows] == [chart.LOST, chart.WON, chart.ALONE, chart.PEER]
    piece = {"op": "rwkv7_keys", "form": "rwkv7 attention", "shape": [1, 2, 3], "dtype": "bfloat16"}
    piece |= {"pass": "fwd", "of_copy": 0.5, "device": "cpu", "commit": "0"}
    rows += [{**piece, "library": name, "implementation": name, "ms": 1.0, "ratio": None} for name in "ab"]
    rows += [{"op": "train_step"}, {"op": "chunk_rwkv7", "peer": "b", "skipped": "why"}]
    made = chart.pictures(rows, tmp_path / "cpu.json")
    assert made == [tmp_path / "cpu.png", tmp_path / "cpu-layers.png"]
    assert all(path.stat().st_size > 1000 for path in made)
    assert [panel.floor for panel in chart.panels(rows) + chart.piece_panels(rows)] == [0.5, 0.5]
    assert chart.pictures([{"op": "train_step"}], tmp_path / "cpu.json") == []
