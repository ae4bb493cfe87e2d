"""Keys and readout on eight fake devices: right results, and nothing is sent but vectors' gradients."""

import fake_devices
import pytest


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_sharded_programs(implementation):
    report = fake_devices.report("layer_ops/sharded_heads.py", implementation)
    assert len(report) == 16
    wrong = {name: r["error"] for name, r in report.items() if r["error"]}
    assert not wrong, wrong
    # vectors' gradients are sums over rows and tokens, at most 5 of [4, 4]; nothing else may leave a device
    allowed = lambda kind, size: kind in ("all-reduce", "reduce-scatter") and size <= 5 * 16
    talk = {name: r["collectives"] for name, r in report.items()}
    too_much = {
        name: found for name, found in talk.items() if not found or not all(allowed(*c) for c in found)
    }
    assert not too_much, too_much
