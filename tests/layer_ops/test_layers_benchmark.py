"""The benchmark of the fused pieces with tiny shapes: it runs on a CPU, its records are whole and merged."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layers.py"
FIELDS = {
    "op",
    "form",
    "implementation",
    "library",
    "shape",
    "dtype",
    "pass",
    "ms",
    "gbs",
    "of_copy",
    "copy_gbs",
    "ratio",
}
FIELDS |= {"versions", "commit", "device", "run"}


def test_quick_writes_whole_records(tmp_path):
    path, other = tmp_path / "cpu.json", {"op": "train_step", "ms": 1.0}
    path.write_text(json.dumps([other]))
    command = [sys.executable, str(SCRIPT), "--quick", "--only", "rwkv7 feed|five", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    first, *found = json.loads(path.read_text())
    assert first == other
    assert {(r["form"], r["pass"]) for r in found} == {
        (f, p) for f in ("rwkv7 feed-forward", "rwkv6 attention, five") for p in ("fwd", "bwd")
    }
    assert all(r.keys() >= FIELDS and r["ms"] > 0 and r["of_copy"] > 0 for r in found)
    assert (
        "rwkv7 feed-forward" in done.stdout
        and "skipped: norm_shift_mix rwkv7 feed-forward FLA" in done.stdout
    )
