"""Decoding with weights on two devices, split by their logical axes. For test_on_devices.py."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import small_models as small

from fla_jax.generation import Decoder, SamplingParams, generate

RULES = (
    ("heads", "model"),
    ("mlp", "model"),
    ("vocab", "model"),
    ("embed", None),
    ("rank", None),
    ("kv", None),
)


def report(version: int) -> dict:
    """Greedy tokens on one device, on two, and in slots; error of the state; implementation; a refusal."""
    model = small.model(version, hidden_size=64, num_layers=2, logical_axes=True)
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    params = small.draw(nn.meta.unbox(boxed))
    shared = jax.device_put(params, shardings)
    key = shared["blocks_0"]["att"]["key"]["kernel"]
    assert len(key.sharding.device_set) == 2 and not key.sharding.is_fully_replicated
    prompts, greedy = [[3, 1, 4, 1, 5], [9], [2, 6, 5]], SamplingParams(temperature=0.0)
    want = generate(model, params, prompts, greedy, max_tokens=6)
    got = generate(model, shared, prompts, greedy, max_tokens=6)
    slots = generate(model, shared, prompts, greedy, max_tokens=6, slots=2)
    try:
        Decoder(model, shared, implementation="plain")
        refused = None
    except ValueError as error:
        refused = str(error)
    return {
        "tokens": [[completion.tokens.tolist() for completion in one] for one in (want, got, slots)],
        "state": small.largest_error(*([one.state.rwkv for one in run] for run in (got, want))),
        "implementation": Decoder(model, shared).implementation,
        "refused": refused,
    }
