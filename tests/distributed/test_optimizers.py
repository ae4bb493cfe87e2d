"""Optax's optimisers in `TrainStep` give what they give without it, on meshes of eight fake devices;
optimizers_run.py does the work.
"""

import pytest
from harness import processes

FAST = ("masked, whole subtrees", "multi_transform", "partition, frozen groups", "muon")
SLOW = (
    "adam",
    "masked",
    "adamw, weight decay of matrices",
    "sgd with momentum",
    "lion",
    "adafactor",
    "lamb",
    "novograd",
    "sm3",
    "muon, optax's choice",
    "rwkv_optimizer, muon",
    "schedule_free",
    "clipped, if finite",
    "MultiSteps",
    "inject_hyperparams",
    "reduce_on_plateau",
)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_optimizer(name):
    found = processes.report("distributed/optimizers_run.py", name)
    assert len(found) == 4
    for mesh in found.values():
        assert mesh["error"] < 1e-13 and mesh["moved"] > 1e-4, found
    # what mirrors a parameter is sharded
    stored = {mesh: numbers["stored"] for mesh, numbers in found.items()}
    sharded = max(stored.pop("fsdp"), stored.pop("fsdp and tensor, explicit"))
    assert sharded < stored["data"] == stored["one device"], found
