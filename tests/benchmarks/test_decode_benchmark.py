"""The benchmark of decoding with tiny sizes: it runs on a CPU, and its records are whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

FOLDER = Path(__file__).parents[2] / "benchmarks"
FIELDS = {
    "op", "implementation", "library", "version", "model", "batch", "ms_per_token", "tokens_per_s",
    "floor_ms", "kernels", "copies", "first_token_s", "weights", "state", "vocab", "versions", "commit",
    "device", "run",
}  # fmt: skip


def test_quick_writes_whole_records(tmp_path):
    path, other = tmp_path / "cpu.json", {"op": "train_step", "ms": 1.0}
    path.write_text(json.dumps([other]))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "decode.py"), "--quick", "--versions", "7", "--out", str(path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rows = json.loads(path.read_text())
    assert first == other
    decode = [row for row in rows if row["op"] == "decode"]
    assert {(row["implementation"], row["batch"]) for row in decode} == {
        (name, batch) for name in ("plain", "model") for batch in (1, 5)
    }
    assert all(set(row) >= FIELDS and row["ms_per_token"] > 0 and row["kernels"] > 10 for row in decode)
    assert {row["implementation"] for row in rows if row["op"] == "prefill"} == {"generate", "apply"}
    assert "skipped" not in done.stdout, done.stdout
