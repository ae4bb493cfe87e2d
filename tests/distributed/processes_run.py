"""One of two processes that train together; prints losses and parameters. For test_processes.py."""

import json
import sys

import jax
import numpy as np
import optax
import small_models as small

from fla_jax.parallel import TrainStep, make_mesh

MESHES = {"fsdp": dict(fsdp=4), "batch and tokens": dict(fsdp=2, sequence=2), "tokens": dict(sequence=4)}


def batch():
    mask = np.random.default_rng(0).uniform(0.5, 1, size=(4, 8)).astype(np.float32)
    return np.asarray(small.tokens(4, 9, seed=2)), mask


def model():
    return small.model(7, vocab_size=32, scan_layers=True, remat="dense")


def local(x, mesh):
    """The batch entries of ``x`` on devices of this process."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    mine = {
        int(i) for i in np.flatnonzero([d.process_index == jax.process_index() for d in mesh.devices.flat])
    }
    rows = sorted({i * parts // mesh.size for i in mine})
    return np.concatenate([np.split(x, parts)[i] for i in rows])


def main(*meshes):
    jax.distributed.initialize()
    assert jax.process_count() == 2 and jax.device_count() == 4, (jax.process_count(), jax.device_count())
    params, found = small.params(model()), {}
    for name in meshes:
        mesh = make_mesh(**MESHES[name])
        step = TrainStep(model(), optax.sgd(0.5), mesh)
        state, losses = step.start(params), []
        mine = step.shard(tuple(local(x, mesh) for x in batch()))
        for _ in range(2):
            state, loss = step(state, mine)
            losses.append(float(loss))
        size = jax.jit(lambda p: sum((x.astype("float32") ** 2).sum() for x in jax.tree.leaves(p)))
        found[name] = [*losses, float(size(state.params))]
    print("REPORT", json.dumps([jax.process_index(), found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
