"""Decoding with weights shared by two devices: for test_sharded_decoding.py.

Heads and hidden channels lie on both devices, as the parameters' logical axes say. Tokens and states must be
those of one device.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
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


def report(version: int) -> dict:
    """Greedy tokens of requests of different lengths on one device, and on two with and without slots; the
    largest difference of the states; the implementation chosen and the refusal of another.
    """
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
    try:
        Decoder(model, shared, implementation="plain")
        refused = None
    except ValueError as error:
        refused = str(error)
    return {
        "tokens": [[request.tolist() for request in one.tokens] for one in (want, got, slots)],
        "state": max(jax.tree.leaves(jax.tree.map(small.error, got.state, want.state))),
        "implementation": Decoder(model, shared).implementation,
        "refused": refused,
    }
