"""Rows of norm, shift and mixes on four fake devices: right results, only parameters' gradients are sent."""

import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def test_sharded_programs():
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    env = dict(
        os.environ,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="cpu",
        PYTHONPATH=path,
        TRITON_INTERPRET="1",
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "sharded_run.py")], env=env, capture_output=True, text=True, timeout=500
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0 and lines, f"exit status {done.returncode}\n{done.stderr[-4000:]}"
    report = json.loads(lines[0].removeprefix("REPORT "))
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
