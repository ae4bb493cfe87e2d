"""Ops, layers and models run in `jax.jit(jax.shard_map(...))` with JAX's check of what varies over which mesh
axes, and in `jax.shard_map` alone; shard_map_run.py does the work on eight fake devices.
"""

import pytest
from harness import processes


@pytest.mark.parametrize("version", [6, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_shard_map(version, implementation):
    found = processes.report("distributed/shard_map_run.py", version, implementation)
    assert len(found) == (2 if implementation == "triton" else 14 if version == 6 else 15)
    wrong = {name: error for name, error in found.items() if isinstance(error, str) or not error < 1e-5}
    assert not wrong, wrong
