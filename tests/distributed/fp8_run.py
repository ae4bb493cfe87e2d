"""FP8 products on eight fake devices: largest differences of losses and scales to one device, after three
steps. For test_on_devices.py."""

import jax
import numpy as np
import optax
import small_models as small

from fla_jax.parallel import TrainStep, make_mesh

MESHES = {
    "data": dict(data=8),
    "all": dict(data=2, fsdp=2, tensor=2),
    "sequence": dict(sequence=4, tensor=2),
}


def train(mesh):
    model = small.model(7, fp8=True, scan_layers=True)
    step = TrainStep(model, optax.sgd(0.1), mesh)
    state, losses = step.start(small.params(small.model(7, scan_layers=True))), []
    for seed in range(3):
        state, loss = step(state, step.shard(np.asarray(small.tokens(8, 9, seed))))
        losses.append(loss)
    return jax.device_get((losses, state.fp8_scales))


def report():
    want = train(make_mesh(devices=jax.devices()[:1]))
    return {name: small.largest_error(train(make_mesh(**sizes)), want) for name, sizes in MESHES.items()}
