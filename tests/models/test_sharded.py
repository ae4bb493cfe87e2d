"""A training step on a (data, model) mesh of fake CPU devices, in its own process: their number must be known
before JAX starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import functools, sys
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import small_models as small
from fla_jax.training import cross_entropy, rwkv_optimizer

version = int(sys.argv[1])
whole = ("embed", "length", "kv", "rank", "layers")
split = (("batch", "data"), ("heads", "model"), ("vocab", "model"), ("mlp", "model"))
rules = (*split, *((name, None) for name in whole))
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
model = small.model(version, scan_layers=True, remat=True, logical_axes=True, implementation="reference")
tokens, tx = small.tokens(8, 9), rwkv_optimizer(1e-2)

def step(state, tokens):
    loss = lambda p: cross_entropy(state.apply_fn({"params": p}, tokens[:, :-1])[0], tokens[:, 1:])
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value

def create(key):
    return TrainState.create(apply_fn=model.apply, params=model.init(key, tokens[:, :1])["params"], tx=tx)

with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    specs = nn.get_partition_spec(jax.eval_shape(create, jax.random.key(0)))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    state = jax.jit(create, out_shardings=shardings, compiler_options=small.FAST_COMPILE)(jax.random.key(0))
    kernel = state.params["blocks"]["att"]["key"]["kernel"]
    assert kernel.names == ("layers", "embed", "heads")
    assert kernel.value.sharding.spec == P(None, None, "model"), kernel.value.sharding
    moment = state.opt_state[1].mu["blocks"]["ffn"]["value"]["kernel"].value
    assert moment.sharding.spec in (P(None, "model"), P(None, "model", None)), moment.sharding
    plain = jax.device_get(nn.meta.unbox(state.params))
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    sharded = jax.jit(
        step, out_shardings=(shardings, None), donate_argnums=0, compiler_options=small.FAST_COMPILE
    )
    losses = []
    for _ in range(4):
        state, value = sharded(state, batch)
        losses.append(float(value))
    after = jax.device_get(nn.meta.unbox(state.params))

one = small.model(version, scan_layers=True, implementation="reference")
state = TrainState.create(apply_fn=one.apply, params=plain, tx=tx)
want = []
single = jax.jit(step, compiler_options=small.FAST_COMPILE)
for _ in range(4):
    state, value = single(state, tokens)
    want.append(float(value))
np.testing.assert_allclose(losses, want, rtol=2e-4)
assert losses[-1] < losses[0]
print("ok", losses)
"""


@pytest.mark.parametrize("version", [7, 6])
def test_training_step(version):
    tests = str(Path(__file__).parents[1])
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(version)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stderr[-3000:]
