"""Long contexts, state tuning and generation with sharded parameters give one device's results; uses_run.py
does the work on eight fake devices.
"""

import pytest
from harness import processes


@pytest.mark.slow
@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.one_python)])
def test_uses(version):
    found = processes.report("distributed/uses_run.py", version)
    assert len(found) == 6 and max(found.values()) < 1e-5, found
    assert found["tuned, float64"] < 1e-9
    assert max(found[f"in shard_map, {name}, float64"] for name in ("checked", "unchecked")) < 1e-11
