"""The benchmark of many devices on fake ones: its records are whole, and one device's numbers come out."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

FIELDS = {"op", "mode", "devices", "ms", "peak_gb", "collectives", "shape", "commit", "device", "run"}


def test_fake_devices(tmp_path, command):
    path = tmp_path / "cpu.json"
    text = command("scaling.py", "--fake", 4, "--steps", 1, "--modes", "fsdp", "sequence, op", "--out", path)
    found = json.loads(path.read_text())
    assert [(r["mode"], r["devices"]) for r in found] == [
        ("fsdp", 1),
        ("fsdp", 4),
        ("sequence, op", 1),
        ("sequence, op", 4),
    ]
    assert all(r.keys() >= FIELDS and r["ms"] > 0 for r in found), found
    assert found[3]["collectives"]["all-gather"] == 2  # (M, N), forward and backward
    assert all(r["difference"] < 1e-5 for r in found if r["devices"] == 4) and text.count("off by") == 2


def test_efficiency(module):
    """Equal work a device, or for the op alone all of it on one."""
    scaling = module("scaling")
    one, many = {"ms": 3.0}, {"ms": 4.0, "devices": 2}
    assert scaling.judged(many, one, scaling.MODES["data"], False)["efficiency"] == 0.75
    assert scaling.judged(many, one, scaling.MODES["sequence, op"], False)["efficiency"] == 0.375
    assert scaling.judged(many, {"error": "no memory"}, scaling.MODES["data"], False) == many
