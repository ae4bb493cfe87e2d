"""Weights that two devices share, heads and channels: sharded_decoding.py in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "sharded_decoding.py"


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.slow)])
def test_tokens_are_those_of_one_device(version):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(version)], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.stdout.endswith("OK\n"), done.stdout + done.stderr[-4000:]
