"""pretrain.py on several NVIDIA GPUs, a process each: killed, resumed, and resumed by one process."""

import os
import secrets
import shutil
import signal

import jax
import numpy as np
import pretraining
import pytest

if jax.default_backend() != "gpu" or jax.device_count() < 2:
    pytest.skip("fewer than two NVIDIA GPUs are visible to JAX", allow_module_level=True)

pytest.importorskip("tensorboardX", reason="pretrain.py needs it")
COUNT = 2 if jax.device_count() < 4 else 4
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(COUNT)))).split(",")[:COUNT]


def launch(*more):
    """A process for each GPU, told of one another by the variables that Open MPI sets."""
    variables = {
        # JAX takes the port of process 0 from the number of the job, which counts in steps of 4096
        "OMPI_MCA_orte_hnp_uri": f"{secrets.randbelow(4096) << 12}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": str(COUNT),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(VISIBLE),
    }
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [pretraining.start(more, variables | dict.fromkeys(ranks, str(i))) for i in range(COUNT)]


def test_killed_and_resumed_equals_straight(tmp_path):
    """Bit by bit, with shared parameters; one process goes on from what several have saved."""
    data, run, other = pretraining.documents(tmp_path), tmp_path / "run", tmp_path / "other"
    shared = ("--cache", tmp_path / "cache", "--mesh-fsdp", 2)
    processes = launch(*pretraining.arguments(data, tmp_path / "straight", *shared))
    outputs = [pretraining.finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * COUNT, outputs
    processes = launch(*pretraining.arguments(data, run, *shared))
    pretraining.wait_for(
        processes[0], lambda: any(path.name.startswith("20.") for path in run.glob("checkpoints/*tmp*"))
    )
    for process in processes:
        process.kill()
    outputs = [pretraining.finish(process) for process in processes]
    assert processes[0].returncode == -signal.SIGKILL, outputs[0]
    shutil.copytree(run, other)
    processes = launch(*pretraining.arguments(data, run, *shared), "--resume")
    outputs = [pretraining.finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * COUNT, outputs
    assert "resuming at step" in outputs[0]
    assert len(pretraining.exact(run)) == pretraining.STEPS
    pretraining.assert_same(run, tmp_path / "straight")
    alone = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": VISIBLE[0]}
    process = pretraining.start(
        pretraining.arguments(data, other, "--cache", tmp_path / "alone", "--resume"), alone
    )
    output = pretraining.finish(process)
    assert process.returncode == 0 and "resuming at step" in output, output
    assert len(pretraining.metrics(other)) == pretraining.STEPS
    np.testing.assert_allclose(pretraining.column(other, "loss"), pretraining.column(run, "loss"), rtol=2e-2)
