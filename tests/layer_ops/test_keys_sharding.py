"""Keys and readout on eight fake devices: right results, and nothing is sent but vectors' gradients."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_sharded_programs(implementation):
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    flags = "--xla_force_host_platform_device_count=8"
    env = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=path, TRITON_INTERPRET="1")
    command = [sys.executable, str(HERE / "sharded_heads.py"), implementation]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0 and lines, f"exit status {done.returncode}\n{done.stderr[-4000:]}"
    report = json.loads(lines[0].removeprefix("REPORT "))
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
