"""Sharded inputs on eight fake devices: right results, and no communication where rows and heads are
independent.
"""

import fake_devices

LAYOUTS = (
    "auto, rows and heads",
    "auto, rows",
    "auto, segments",
    "auto, time",
    "explicit, rows and heads",
    "explicit, rows",
    "explicit, no initial state",
    "shard_map, rows and heads",
    "shard_map with its check, no initial state",
)


def test_sharded_programs(pair):
    op, implementation = pair
    report = fake_devices.report("distributed/sharded_run.py", op, implementation)
    assert tuple(report) == LAYOUTS
    over_time = report["auto, time"]
    if implementation == "triton":  # a kernel would have to gather; XLA does that with plain JAX
        assert "axis T of an argument [B, T, H, K] is sharded over mesh axis 'data'" in over_time.pop("error")
        over_time |= {"error": None, "collectives": [None]}
    wrong = {name: r["error"] for name, r in report.items() if r["error"]}
    assert not wrong, wrong
    # du is a sum over rows: at most one all-reduce of it, [H, K] = 16 numbers; nothing else may leave a
    # device
    allowed = lambda kind, size: op == "rwkv6" and kind in ("all-reduce", "reduce-scatter") and size <= 16
    talk = {name: r["collectives"] for name, r in report.items() if name != "auto, time"}
    too_much = {
        name: found for name, found in talk.items() if not all(allowed(*c) for c in found) or len(found) > 1
    }
    assert not too_much, too_much
    if op == "rwkv6":  # the count sees what is there
        assert all(found for found in talk.values()), talk
    # time over devices: XLA gathers or permutes, but must not be wrong
    assert over_time["collectives"]
