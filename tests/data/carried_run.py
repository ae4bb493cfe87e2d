"""Training steps with carried states on eight fake devices and on one. For test_documents.py."""

from __future__ import annotations

import grain
import jax
import numpy as np
import optax
import small_models as small

from fla_jax.data import pack_documents
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import carried_loss, zero_carry


def report():
    model = small.model(7, num_layers=1)
    rng = np.random.default_rng(0)
    documents = grain.MapDataset.source([np.array([*rng.integers(1, 24, 30), 0]) for _ in range(8)])
    meshes = {
        "one device": make_mesh(devices=jax.devices()[:1]),
        "mesh": make_mesh(data=2, fsdp=2, tensor=2),
    }
    return {name: losses(model, documents, mesh) for name, mesh in meshes.items()}


def losses(model, documents, mesh):
    step = TrainStep(model, optax.sgd(0.1), mesh, carried_loss(model), has_aux=True)
    state, carry, found = step.start(small.params(model)), zero_carry(model, 4), []
    for batch in pack_documents(documents, 8, 4, carry_state=True):
        state, (loss, carry) = step(state, {**step.shard(batch), "carry": carry})
        found.append(float(loss))
    return found
