"""The benchmark of training steps with a tiny model on a CPU, and what its parts say."""

import gzip
import json

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]


def test_quick_writes_whole_records(tmp_path, command, module):
    """A CPU has no FLA: its failure is recorded, this side's numbers too, and what other benchmarks wrote
    stays.
    """
    results = tmp_path / "results.json"
    old = {"op": "train_step", "implementation": "fla", "shape": {}, "ms": 2.0}
    results.write_text(json.dumps([{"op": "chunk_rwkv7", "ms": 1.0}, old]))
    command("train_step.py", "--quick", "--implementation", "reference", "--out", results)
    module("train_step").main(
        ["--quick", "--sides", "fla", "--fla-python", "no/python", "--out", str(results)]
    )
    other, smaller, ours, dense, fla = json.loads(results.read_text())
    assert (ours["remat"], dense["remat"]) == ("none", "dense") and "error" not in dense
    assert other == {"op": "chunk_rwkv7", "ms": 1.0} and smaller["ms"] == 2.0
    assert ours["implementation"] == "fla_jax" and ours["shape"]["vocab"] == 300 and "error" not in ours
    assert ours["tokens_per_s"] == pytest.approx(16 / ours["ms"] * 1e3)
    assert ours["first_step_s"] > ours["compile_s"] > 0 and ours["peak_gb"] > 0
    assert ours["loss_last"] < ours["loss_first"] and abs(ours["loss_first"] - np.log(300)) < 1
    rate = 6 * (ours["parameters"] - 300 * 64) * ours["tokens_per_s"]
    assert ours["share_6n"] == pytest.approx(rate / 989e12)
    assert ours["commit"] and ours["versions"]["jax"] and ours["scan"] is False
    assert fla["implementation"] == "fla" and "FileNotFoundError" in fla["error"]


def test_sizes_are_the_named_ones(module):
    train_step = module("train_step")
    rows = train_step.sizes_of(train_step.parse(["--sizes", "all"]))
    assert [(r.model, r.layers, r.width, r.batch, r.tokens, r.vocab) for r in rows] == [
        ("rwkv7", 24, 1024, 8, 4096, 32000),
        ("rwkv7", 24, 2048, 4, 4096, 32000),
        ("rwkv7", 12, 768, 16, 4096, 32000),
        ("rwkv6", 24, 1024, 8, 4096, 32000),
    ]
    [row] = train_step.sizes_of(train_step.parse(["--sizes", "rwkv6-24x1024", "--layers", "2"]))
    assert (row.model, row.layers, row.width) == ("rwkv6", 2, 1024)


def test_a_loss_that_does_not_fall_is_no_peer(module):
    train_step = module("train_step")
    base = {"op": "train_step", "model": "rwkv7", "shape": {"layers": 1}, "loss_first": 10.5}
    ours = {**base, "implementation": "fla_jax", "ms": 2.0, "loss_last": 0.6}
    stuck = {**base, "implementation": "rwkv-lm", "ms": 1.0, "loss_last": 9.0}
    trains = {**base, "implementation": "fla", "ms": 3.0, "loss_last": 0.7}
    train_step.compare([ours, stuck, trains])
    assert (ours["peer"], ours["peer_ms"], ours["ratio"]) == ("fla", 3.0, 1.5)
    assert "no peer" in stuck["note"] and "note" not in trains


def test_kernels_are_summed_by_name(module, tmp_path):
    """What ran on streams of GPUs, and nothing of what a profile tells a second time or of the host."""
    times = module("steps.kernel_times")

    def meta(name, pid, said, tid=0):
        return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": said}}

    def ran(name, us, pid=1, tid=7):
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 0, "dur": us}

    events = [meta("process_name", 1, "/device:GPU:0"), meta("process_name", 2, "/host:CPU")]
    events += [meta("thread_name", 1, "Stream #7(Compute)", 7), meta("thread_name", 1, "XLA Ops", 8)]
    events += [ran("nvjet_tst_1", 3000), ran("loop_fusion_12", 1000), ran("loop_fusion.3", 500)]
    events += [ran("mix_fwd_kernel", 250), ran("rwkv7_fwd_kernel", 250)]
    events += [ran("loop_fusion_12", 1000, tid=8), ran("nvjet_tst_1", 9, pid=2)]
    (tmp_path / "deep").mkdir()
    with gzip.open(tmp_path / "deep" / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = times.kernels(tmp_path)
    assert found[:2] == [("nvjet_tst", 3.0, 1), ("loop_fusion", 1.5, 2)]
    assert times.by_kind(found) == {
        "products": 3.0,
        "other fusions": 1.5,
        "fused pieces": 0.25,
        "recurrences": 0.25,
    }
    assert "nvjet_tst" in times.table(found, 1)
    with pytest.raises(FileNotFoundError, match="has no profile"):
        times.kernels(tmp_path / "nowhere")
