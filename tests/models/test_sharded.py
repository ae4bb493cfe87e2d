"""A training step on a (data, model) mesh of eight fake devices has one device's losses; sharded_run.py does
the work.
"""

import numpy as np
import pytest
from harness import processes
from jax.sharding import PartitionSpec as P


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.one_python)])
def test_training_step(version):
    found = processes.report("models/sharded_run.py", version)
    assert found["names"] == ("layers", "embed", "heads")
    assert found["kernel"] == P(None, None, "model")
    assert found["moment"] in (P(None, "model"), P(None, "model", None))
    np.testing.assert_allclose(found["losses"], found["on one"], rtol=2e-4)
    assert found["losses"][-1] < found["losses"][0]
