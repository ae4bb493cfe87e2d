"""Training steps with carried states on eight fake devices, and a plain loop. For test_carry.py."""

from __future__ import annotations

import functools

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
    documents = grain.MapDataset.source([np.array([*rng.integers(1, 24, 30), 0]) for _ in range(16)])
    batches = list(pack_documents(documents, 8, 8, carry_state=True))
    meshes = {
        "microbatches": (make_mesh(data=2, fsdp=2, tensor=2), 2),
        "explicit": (make_mesh(data=4, tensor=2, explicit=True), 2),
        "tokens": (make_mesh(data=4, sequence=2), 1),
    }
    found = {name: losses(model, batches, *options) for name, options in meshes.items()}
    return found | {"plain loop": plain_losses(model, batches)}


def losses(model, batches, mesh, accumulate):
    """The loss of an evaluation, and those of the steps after it."""
    step = TrainStep(model, optax.sgd(0.1), mesh, carry_sequences=8, accumulate=accumulate)
    state = step.start(small.params(model))
    found = [step.evaluate(state, batches)]
    for batch in batches:
        state, loss = step(state, step.shard(batch))
        found.append(float(loss))
    assert step._compiled._cache_size() == step._evaluate._cache_size() == 1
    return found


def plain_losses(model, batches):
    """Every sequence alone, its state passed on by hand; an evaluation is steps without a rate."""
    loss_of = carried_loss(model)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def summed(params, batch):
        loss, carry = loss_of(params, batch)
        return loss * batch["mask"].sum(), carry

    def steps(rate):
        params, carries = small.params(model), [zero_carry(model, 1)] * 8
        for batch in batches:
            weight, found = batch["mask"].sum(), []
            for b in range(8):
                one = {name: x[b : b + 1] for name, x in batch.items()}
                found.append(summed(params, {**one, "carry": carries[b]}))
            sums, carries = zip(*(value for value, _ in found))
            grads = jax.tree.map(lambda *grads: sum(grads), *(grads for _, grads in found))
            scale = rate / weight
            params = jax.tree.map(lambda p, g, scale=scale: p - scale * g, params, grads)
            yield float(sum(sums)) / weight, weight

    losses, weights = zip(*steps(0.0))
    return [np.average(losses, weights=weights), *(loss for loss, _ in steps(0.1))]
