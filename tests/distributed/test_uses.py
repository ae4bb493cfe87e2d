"""Long contexts, state tuning and generation with sharded parameters give one device's results; uses_run.py
does the work in a process with eight fake devices.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("version", [7, 6])
def test_uses(version):
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, str(HERE / "uses_run.py"), str(version)]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 5 and max(found.values()) < 1e-5, found
    assert found["in shard_map, float64"] < 1e-11
