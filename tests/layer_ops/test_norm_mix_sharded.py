"""Rows of norm, shift and mixes on four fake devices: right results, only parameters' gradients are sent."""

import fake_devices


def test_sharded_programs():
    report = fake_devices.report("layer_ops/sharded_run.py")
    assert len(report) == 12
    wrong = {name: r["error"] for name, r in report.items() if "error" in r}
    assert not wrong, wrong
    for name, r in report.items():
        assert max(r.get("errors", {"none": 0}).values()) <= 1e-6, (name, r["errors"])
        # gradients of two mixes, scale and bias of six channels, in one or in four
        assert r["collectives"], name  # the count sees what is there
        # and of tokens over devices: a row [2, 6] forward, again and its gradient backward, the last ids,
        # ``last``
        row = ("collective-permute",) if "tokens" in name else ()
        assert all(kind in ("all-reduce", *row) and size <= 24 for kind, size in r["collectives"]), (
            name,
            r["collectives"],
        )
        assert sum(kind == "collective-permute" for kind, _ in r["collectives"]) <= 5, (
            name,
            r["collectives"],
        )


def test_gradients_of_each_example_on_an_explicit_mesh():
    """Plain JAX sums gradients of parameters over its rows: over those of an example, not of all of them."""
    found = fake_devices.report("layer_ops/sharded_run.py", "mapped")
    assert not found, found
