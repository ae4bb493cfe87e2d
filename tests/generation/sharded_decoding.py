"""Decoding with weights shared by two devices: run by test_sharded_decoding.py in a process with two CPUs.

Heads and hidden channels lie on both devices, as the parameters' logical axes say. Tokens and states must be
those of one device.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import small_models as small

from fla_jax.generation import Decoder, Sampling, generate

RULES = (
    ("heads", "model"),
    ("mlp", "model"),
    ("vocab", "model"),
    ("embed", None),
    ("rank", None),
    ("kv", None),
)


def check(version: int) -> None:
    """Greedy tokens of rows of different lengths, with and without slots."""
    model = small.model(version, hidden_size=64, num_layers=2, logical_axes=True)
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    params = small.draw(nn.meta.unbox(boxed))
    shared = jax.device_put(params, shardings)
    key = shared["blocks_0"]["att"]["key"]["kernel"]
    assert len(key.sharding.device_set) == 2 and not key.sharding.is_fully_replicated
    prompts, greedy = [[3, 1, 4, 1, 5], [9], [2, 6, 5]], Sampling(temperature=0.0)
    want = generate(model, params, prompts, 6, greedy)
    got = generate(model, shared, prompts, 6, greedy)
    slots = generate(model, shared, prompts, 6, greedy, slots=2)
    for i, row in enumerate(want.tokens):
        for other in (got.tokens[i], slots.tokens[i]):
            np.testing.assert_array_equal(row, other)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(small.error(a, b), 1e-5), got.state, want.state)
    assert Decoder(model, shared).implementation == "model"
    try:
        Decoder(model, shared, implementation="plain")
    except ValueError as error:
        assert "the parameters lie on several devices" in str(error)


if __name__ == "__main__":
    assert len(jax.devices()) == 2
    jax.config.update("jax_disable_most_optimizations", True)
    for version in map(int, sys.argv[1:]):
        check(version)
    print("OK")
