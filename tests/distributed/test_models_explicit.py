"""The models on a mesh with explicit axes; explicit_run.py does the work in a process with eight fake
devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("version", [6, 7])
def test_models(version):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, str(HERE / "explicit_run.py"), str(version)]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 22 and not {k: v for k, v in found.items() if isinstance(v, str) or v > 1e-5}, found
    assert found["numbers"] < 1e-11
