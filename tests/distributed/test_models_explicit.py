"""The models on a mesh of eight fake devices with explicit axes; explicit_run.py does the work."""

import pytest
from harness import processes


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.slow)])
def test_models(version):
    found = processes.report("distributed/explicit_run.py", version)
    assert len(found) == 22 and not {k: v for k, v in found.items() if isinstance(v, str) or v > 1e-5}, found
    assert found["numbers"] < 1e-11
