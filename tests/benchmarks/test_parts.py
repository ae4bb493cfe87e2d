"""What the parts of benchmarks compute: bytes, ratios, peers, sums of kernels, launches, pictures."""

import gzip
import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

TASK = {"op": "chunk_rwkv7", "form": "chunk", "shape": [1, 2, 3, 4, 5], "dtype": "bfloat16", "pass": "fwd"}


def record(library, ms, decay="bounded", **rest):
    return {**TASK, "library": library, "implementation": library, "decay": decay, "ms": ms, **rest}


@pytest.mark.parametrize(
    "passes, dtype, device, ms",
    [
        ("fwd", "bfloat16", "NVIDIA H200", 0.44),
        ("fwd+bwd", "bfloat16", "NVIDIA H200", 1.26),
        ("fwd+bwd", "float32", "NVIDIA H200", 2.51),
        ("fwd", "bfloat16", "another", None),
    ],
)
def test_roofline_is_the_bytes_that_must_move(module, passes, dtype, device, ms):
    task = module("peers.ops").Task("chunk_rwkv7", "chunk", (8, 4096, 64, 64, 64), passes, "bounded", dtype)
    assert module("recurrences.plan").roofline_ms(task, device) == (ms and pytest.approx(ms, abs=0.01))


def test_the_peer_is_the_fastest_with_equal_decays(module):
    ours = record("fla_jax", 2.0, ms_end=3.0)
    others = [record("a", 6.0), record("b", 4.0, "any-weak"), record("c", 1.0, "any-strong")]
    module("recurrences.report").compare([ours, *others])
    assert ours["peer"] == "b" and ours["peer_ms"] == 4.0 and ours["ratio"] == 0.75


@pytest.mark.parametrize("timed, best", [("fwd", "wrong"), ("fwd+bwd", "right")])
def test_a_peer_has_finite_results(timed, best, module):
    """Of the pass that was timed: gradients that are NaN say nothing against a forward."""
    each = {"fla_jax": (2.0, None), "wrong": (3.0, "a note; not finite: dw"), "right": (4.0, "a note")}
    found = [record(name, ms, note=note) | {"pass": timed} for name, (ms, note) in each.items()]
    module("recurrences.report").compare(found)
    assert found[0]["peer"] == best
    found[1]["note"] = "not finite: o, dw; another"
    module("recurrences.report").compare(found)
    assert found[0]["peer"] == "right"


def test_bytes_and_ratios_of_layers(module):
    """Six mixes read x and y and write x + y and six arrays; a ratio is our time over the fastest peer's."""
    moved = (
        module("layer_ops.layer_op").layer_op_of("norm_shift_mix rwkv7 attention").moved((8, 4096, 1024), 2)
    )
    assert moved == {"fwd": 9 * 2 * 8 * 4096 * 1024, "bwd": 9 * 2 * 8 * 4096 * 1024}
    found = [record(name, ms, ratio=None) for name, ms in (("fla_jax", 1.0), ("FLA", 4.0), ("b", 2.0))]
    module("layers").compare(found)
    assert [r["ratio"] for r in found] == [0.5, None, None]


def test_peers_of_layers_come_shape_by_shape(module, monkeypatch):
    """All cores compile before one process times; a run that ends early has all at one shape."""
    layers, runner, layer_op_of = module("layers"), module("runner"), module("layer_ops.layer_op").layer_op_of
    started, settings = [], []

    class Process(runner.Process):
        def __init__(self, work, name, jobs, given, **more):
            started.append([(job["layer_op"], job["shape"]) for job in jobs])
            settings.append(given["shares"])
            super().__init__(work, name, [], given, **more)

    monkeypatch.setattr(runner, "Process", Process)
    monkeypatch.setattr(runner, "is_importable", lambda name: True)
    monkeypatch.setattr(layers.os, "cpu_count", lambda: 2)
    layer_ops = [layer_op_of(f"rwkv{version}_readout rwkv{version} attention") for version in (7, 6)]
    shapes, skipped = ((1, 2, 64), (2, 2, 64)), []
    options = layers.parse(["--timeout", "20", "--compile-seconds", "20"])
    jobs = [(layer_op, shape) for layer_op in layer_ops for shape in shapes]
    assert list(layers.measure_peers(jobs, options, {"dtype": "bfloat16"}, skipped)) == []
    assert settings == [(0, 2), (1, 2), None]
    assert started == [[(layer_op.label, shape) for shape in shapes for layer_op in layer_ops]] * 3
    assert len(skipped) == 4


def test_tables_of_launches_are_restored(module):
    launches, layer_op_of = module("layer_ops.launches"), module("layer_ops.layer_op").layer_op_of
    options = launches.options(layer_op_of("norm_shift_mix rwkv7 attention"), (1, 8, 1024), "bwd", quick=True)
    tables = [table for option in options for table, _, _ in option.entries]
    before = [dict(table) for table in tables]
    for option in options:
        with pytest.raises(ZeroDivisionError), launches.taken(option):
            assert all(table.get(key) == value for table, key, value in option.entries)
            raise ZeroDivisionError
    assert options and [dict(table) for table in tables] == before
    assert launches.options(layer_op_of("rwkv7_keys rwkv7 attention"), (1, 8, 1024), "fwd", quick=True)


def test_sizes_of_training_steps(module):
    train_step = module("train_step")
    sizes = train_step.sizes_of(train_step.parse(["--sizes", "all"]))
    named = [("rwkv7", 24, 1024, 8), ("rwkv7", 24, 2048, 4), ("rwkv7", 12, 768, 16), ("rwkv6", 24, 1024, 8)]
    assert [(s.model, s.layers, s.width, s.batch) for s in sizes] == named
    assert {(s.tokens, s.vocab) for s in sizes} == {(4096, 32000)}
    [size] = train_step.sizes_of(train_step.parse(["--sizes", "rwkv6-24x1024", "--layers", "2"]))
    assert (size.model, size.layers, size.width) == ("rwkv6", 2, 1024)


def test_a_loss_that_does_not_fall_is_no_peer(module):
    base = {"op": "train_step", "model": "rwkv7", "shape": {"layers": 1}, "loss_first": 10.5}
    ours = {**base, "implementation": "fla_jax", "ms": 2.0, "loss_last": 0.6}
    stuck = {**base, "implementation": "rwkv-lm", "ms": 1.0, "loss_last": 9.0}
    trains = {**base, "implementation": "fla", "ms": 3.0, "loss_last": 0.7}
    module("train_step").compare([ours, stuck, trains])
    assert (ours["peer"], ours["peer_ms"], ours["ratio"]) == ("fla", 3.0, 1.5)
    assert "no peer" in stuck["note"] and "note" not in trains


def test_kernels_are_summed_by_name(module, tmp_path):
    """The streams of GPUs count, the host and other lines of a profile do not."""
    times = module("steps.kernel_times")
    names = [("process_name", 1, 0, "/device:GPU:0"), ("process_name", 2, 0, "/host:CPU")]
    names += [("thread_name", 1, 7, "Stream #7(Compute)"), ("thread_name", 1, 8, "XLA Ops")]
    ran = [("nvjet_tst_1", 3000, 1, 7), ("loop_fusion_12", 1000, 1, 7), ("loop_fusion.3", 500, 1, 7)]
    ran += [("mix_fwd_kernel", 250, 1, 7), ("rwkv7_fwd_kernel", 250, 1, 7)]
    ran += [("loop_fusion_12", 1000, 1, 8), ("nvjet_tst_1", 9, 2, 7)]
    events = [{"ph": "M", "name": n, "pid": p, "tid": t, "args": {"name": said}} for n, p, t, said in names]
    events += [{"ph": "X", "name": n, "pid": p, "tid": t, "ts": 0, "dur": us} for n, us, p, t in ran]
    (tmp_path / "deep").mkdir()
    with gzip.open(tmp_path / "deep" / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = times.kernels(times.events_of(tmp_path))
    assert found[:2] == [("nvjet_tst", 3.0, 1), ("loop_fusion", 1.5, 2)]
    sums = {"products": 3.0, "other fusions": 1.5, "layer operations": 0.25, "recurrences": 0.25}
    assert times.by_kind(found) == sums and "nvjet_tst" in times.table(found, 1)
    with pytest.raises(FileNotFoundError, match="has no profile"):
        times.events_of(tmp_path / "nowhere")


def test_time_that_nothing_hides(module):
    """On one device a collective ends 2 ms after the product beside it, and 1 ms later a fusion follows; on
    the other a collective runs beside a fusion.
    """
    times = module("steps.kernel_times")
    ran = [("nvjet", 0, 4), ("ncclDevKernel_AllGather", 1, 6), ("loop_fusion", 7, 8)]
    events = [times.Event(1, *one) for one in ran]
    events += [times.Event(2, "loop_fusion", 0, 3), times.Event(2, "ncclDevKernel_AllGather", 1, 2)]
    assert times.not_hidden(events) == {"collectives alone": 2, "idle": 1}


def test_efficiency(module):
    """Equal work a device, or for the op alone all of it on one."""
    scaling = module("scaling")
    one, many = {"ms": 3.0}, {"ms": 4.0, "devices": 2}
    efficiency = lambda one, mode: scaling.with_efficiency(many, one, scaling.MODES[mode], False)
    assert efficiency(one, "data")["efficiency"] == 0.75
    assert efficiency(one, "sequence, op")["efficiency"] == 0.375
    assert efficiency({"error": "no memory"}, "data") == many


def test_rates_of_a_server(module):
    """Two groups of clients; measured from the ramp's end until a group begins its last request."""
    load = module("serving.load")
    settings = load.Load(vocab=9, clients=2, each=2, lengths=[1, 2], tokens=[3, 5], ramp=1.0)
    first = [load.Timed(0.0, 0.5, 2.5, 20), load.Timed(2.5, 2.5, 6.5, 40)]
    second = [load.Timed(1.0, None, 3.0, 20), load.Timed(3.0, None, 7.0, 40)]
    found = load.rates(settings, [first, second])
    # from 1.0 to 2.5: three quarters of the first request, three quarters of the third
    assert found["full_s"] == 1.5 and found["full_per_s"] == pytest.approx((15 + 15) / 1.5)
    assert found["took_s"] == 7.0 and found["tokens_per_s"] == pytest.approx(120 / 7)
    assert (found["first_token_s"], found["first_token_95_s"], found["requests"]) == (0.25, 0.5, 4)
    requests = settings.requests()
    assert requests == settings.requests() and len(requests) == 4
    assert all(len(prompt) in (1, 2) and 3 <= new <= 5 for prompt, new in requests)
    assert all(1 <= token < 9 for prompt, _ in requests for token in prompt)
