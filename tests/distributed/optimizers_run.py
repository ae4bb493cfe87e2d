"""Two steps of optax's optimisers in `TrainStep` and without it on one device. For test_on_devices.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_models as small
from optax import contrib

from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import matrix_mask, muon_dimension_numbers, parameter_groups, rwkv_optimizer

MESHES = {
    "one device": (1, dict()),
    "data": (8, dict(data=8)),
    "fsdp": (8, dict(fsdp=8)),
    "fsdp and tensor, explicit": (8, dict(fsdp=4, tensor=2, explicit=True)),
}
FEW = {"decay_base": optax.adam(2e-2), "matrix": optax.adamw(1e-2), "other": optax.sgd(1e-2, momentum=0.9)}
FROZEN = {"decay_base": optax.set_to_zero(), "matrix": optax.adamw(1e-2), "other": optax.set_to_zero()}
# the fast tier runs the first four
OPTIMIZERS = {
    "masked, whole subtrees": lambda params: optax.masked(
        optax.adam(1e-2), {name: name == "blocks_0" for name in params}
    ),
    "multi_transform": lambda params: optax.multi_transform(FEW, parameter_groups),
    "partition, frozen groups": lambda params: optax.partition(FROZEN, parameter_groups(params)),
    "muon": lambda params: contrib.muon(1e-2, muon_weight_dimension_numbers=muon_dimension_numbers),
    "adam": lambda params: optax.adam(1e-2),
    "adamw, weight decay of matrices": lambda params: optax.adamw(1e-2, weight_decay=0.1, mask=matrix_mask),
    "sgd with momentum": lambda params: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": lambda params: optax.lion(1e-3),
    "adafactor": lambda params: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda params: optax.lamb(1e-2),
    "novograd": lambda params: optax.novograd(1e-2),
    "sm3": lambda params: optax.sm3(1e-2),
    "masked": lambda params: optax.masked(optax.adamw(1e-2), matrix_mask),
    "muon, optax's choice": lambda params: contrib.muon(1e-2),
    "rwkv_optimizer, muon": lambda params: rwkv_optimizer(1e-2, kind="muon"),
    "schedule_free": lambda params: contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "clipped, if finite": lambda params: optax.chain(
        optax.clip_by_global_norm(0.1), optax.apply_if_finite(optax.adam(1e-2), 3)
    ),
    "MultiSteps": lambda params: optax.MultiSteps(optax.masked(optax.adam(1e-2), matrix_mask), 2),
    "inject_hyperparams": lambda params: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(1e-2, 1e-3, 2)
    ),
    "reduce_on_plateau": lambda params: optax.chain(
        optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, cooldown=0)
    ),
}


def loss(params, rows):
    """Of a mean over rows: it compiles in no time, and gradients of models are in parallel_run.py."""
    target = jnp.mean(rows)
    return sum(jnp.mean((jnp.sin(x) - target) ** 2) for x in jax.tree.leaves(params))


def alone(optimizer, params, batches):
    """Two steps by optax and JAX."""
    update = optax.with_extra_args_support(optimizer).update

    @jax.jit
    def step(params, state, rows):
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, state = update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for rows in batches:
        params, state = step(params, state, rows)
    return params, state


def report(name):
    found = {}
    # what float32 rounds differently is a whole step where only a gradient's sign counts
    with small.float64():
        model = small.model(7, num_layers=1, dtype="float64", param_dtype="float64")
        params = small.params(model)
        batches = np.random.default_rng(0).normal(size=(2, 8))
        optimizer = OPTIMIZERS[name](params)
        want = alone(optimizer, params, batches)
        for mesh, (count, sizes) in MESHES.items():
            devices = jax.devices()[:count]
            step = TrainStep(model, optimizer, make_mesh(**sizes, devices=devices), loss)
            state = step.start(params)
            for rows in batches:
                state, _ = step(state, step.shard(rows))
            found[mesh] = {
                "error": small.largest_error((state.params, state.opt_state), want),
                "moved": small.largest_error(params, want[0]),
                "stored": sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.opt_state)),
            }
    return found
