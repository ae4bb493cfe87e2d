"""The benchmark of many devices on fake ones: complete records, and the numbers of one device."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

FIELDS = {"op", "mode", "devices", "ms", "peak_gb", "collectives", "shape", "commit", "device", "run"}


def test_fake_devices(tmp_path, command):
    path = tmp_path / "cpu.json"
    text = command("scaling.py", "--fake", 4, "--steps", 1, "--modes", "fsdp", "sequence, op", "--out", path)
    found = json.loads(path.read_text())
    each = [(mode, devices) for mode in ("fsdp", "sequence, op") for devices in (1, 4)]
    assert [(r["mode"], r["devices"]) for r in found] == each
    assert all(r.keys() >= FIELDS and r["ms"] > 0 for r in found), found
    assert found[3]["collectives"]["all-gather"] == 2  # (M, N), forward and backward
    assert all(r["difference"] < 1e-5 for r in found if r["devices"] == 4) and text.count("off by") == 2


def test_efficiency(module):
    """Equal work a device, or for the op alone all of it on one."""
    scaling = module("scaling")
    one, many = {"ms": 3.0}, {"ms": 4.0, "devices": 2}
    judge = lambda one, mode: scaling.with_efficiency(many, one, scaling.MODES[mode], False)
    assert judge(one, "data")["efficiency"] == 0.75
    assert judge(one, "sequence, op")["efficiency"] == 0.375
    assert judge({"error": "no memory"}, "data") == many
