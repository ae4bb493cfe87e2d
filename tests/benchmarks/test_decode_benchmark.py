"""The benchmark of decoding with tiny sizes: it runs on a CPU, and its records are complete."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

FIELDS = {
    "op", "implementation", "library", "version", "model", "batch", "ms_per_token", "tokens_per_s",
    "floor_ms", "kernels", "copies", "first_token_s", "weights", "state", "vocab", "versions", "commit",
    "device", "run",
}  # fmt: skip


def test_quick_writes_complete_records(tmp_path, command):
    path, other = tmp_path / "cpu.json", {"op": "train_step", "ms": 1.0}
    path.write_text(json.dumps([other]))
    arguments = ("--engine", "--peers", "fla", "--batches", 1, 5, "--out", path)
    text = command("decode.py", "--quick", "--versions", 7, *arguments)
    first, *found = json.loads(path.read_text())
    assert first == other
    decode = [r for r in found if r["op"] == "decode"]
    names = {(r["implementation"], r["batch"]) for r in decode}
    assert names == {(name, batch) for name in ("plain", "model") for batch in (1, 5)}
    assert all(set(r) >= FIELDS and r["ms_per_token"] > 0 and r["kernels"] > 10 for r in decode)
    assert {r["implementation"] for r in found if r["op"] == "prefill"} == {"generate", "apply"}
    assert [r["batch"] for r in found if r["op"] == "engine"] == [1, 5]
    skipped = [line for line in text.splitlines() if line.startswith("skipped")]
    assert len(skipped) == 2 and all("ModuleNotFoundError" in line for line in skipped), (
        "peers' errors are said"
    )
