"""Two processes, known to each other by SLURM's or Open MPI's variables, train as one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small

from fla_jax.training import next_token_loss

HERE = Path(__file__).parent
MANAGERS = {
    "SLURM": lambda rank: {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    },
    "Open MPI": lambda rank: {
        "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
    },
}


def run(manager, *meshes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = {
        **os.environ,
        "XLA_FLAGS": flags,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_PORT": port,
    }
    command = [sys.executable, str(HERE / "processes_run.py"), *meshes]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen(command, env=env | MANAGERS[manager](rank), **pipes) for rank in "01"]
    try:
        said = [one.communicate(timeout=400) for one in both]
    finally:
        for one in both:
            one.kill()
    assert [one.returncode for one in both] == [0, 0], "\n".join(err[-2000:] for _, err in said)
    return [json.loads(out.split("REPORT ")[1].splitlines()[0]) for out, _ in said]


def alone():
    """The same training in this process: two losses, and the sum of squares of all parameters."""
    model = small.model(7, vocab_size=32, scan_layers=True)
    loss, optimizer, params = next_token_loss(model), optax.sgd(0.5), small.params(model)
    mask = np.random.default_rng(0).uniform(0.5, 1, size=(4, 8)).astype(np.float32)
    batch = small.tokens(4, 9, seed=2), jnp.asarray(mask)
    step = jax.jit(jax.value_and_grad(loss))
    state, losses = optimizer.init(params), []
    for _ in range(2):
        value, grads = step(params, batch)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return [*losses, float(sum(jnp.sum(x**2) for x in jax.tree.leaves(params)))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "manager, meshes",
    [
        pytest.param("SLURM", ("batch and tokens", "tokens"), marks=pytest.mark.one_python),
        ("Open MPI", ("fsdp",)),
    ],
)
def test_two_processes(manager, meshes):
    (first, one), (second, two) = run(manager, *meshes)
    assert (first, second) == (0, 1) and one == two and tuple(one) == meshes
    want = alone()
    for name, got in one.items():
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
