"""Weights that two devices share, heads and channels; sharded_decoding.py does the work."""

import pytest
from harness import processes


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=(pytest.mark.slow, pytest.mark.one_python))])
def test_tokens_are_those_of_one_device(version):
    found = processes.report("generation/sharded_decoding.py", version)
    want, got, slots = found["tokens"]
    assert got == want and slots == want
    assert found["state"] < 1e-5
    assert found["implementation"] == "model"
    assert "the parameters lie on several devices" in found["refused"]
