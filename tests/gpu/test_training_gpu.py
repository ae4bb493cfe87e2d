"""Training on an NVIDIA GPU at long T: bfloat16 follows float32."""

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fla_jax.models import (
    RWKV6Config,
    RWKV6ForCausalLM,
    RWKV7Config,
    RWKV7ForCausalLM,
    initial_params,
    stack_layers,
    unstack_layers,
)
from fla_jax.training import cross_entropy, rwkv_optimizer, rwkv_schedule

if jax.default_backend() != "gpu":
    pytest.skip("no NVIDIA GPU is visible to JAX", allow_module_level=True)

T, BATCH, STEPS = 6000, 4, 200
MODELS = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}


def losses(version: int, dtype) -> np.ndarray:
    config, model = MODELS[version]
    model = model(config(vocab_size=256, hidden_size=256, num_layers=4, dtype=dtype))
    text = np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - T - 1, (STEPS, BATCH))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    optimizer = rwkv_optimizer(rwkv_schedule(6e-4, 6e-5, STEPS))  # the official recipe

    @jax.jit
    def train_step(params, state, tokens):
        loss, grads = jax.value_and_grad(
            lambda p: cross_entropy(model.apply({"params": p}, tokens[:, :-1])[0], tokens[:, 1:])
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, curve = optimizer.init(params), []
    for row in starts:
        tokens = jnp.asarray(np.stack([text[s : s + T + 1] for s in row]).astype(np.int32))
        params, state, loss = train_step(params, state, tokens)
        curve.append(loss)
    return np.asarray(jax.device_get(curve), np.float64)


@pytest.mark.parametrize("version", MODELS)
def test_bfloat16_follows_float32(version):
    """By the mean over ten steps: single steps drift apart and back again."""
    exact, half = losses(version, jnp.float32), losses(version, jnp.bfloat16)
    assert np.all(np.isfinite(half))
    assert exact[-1] < 0.6 * exact[0]  # it learns
    smooth = lambda curve: np.convolve(curve, np.full(10, 0.1), "valid")
    apart = lambda a, b: np.abs(a - b) / b
    step, mean = apart(half, exact), apart(smooth(half), smooth(exact))
    assert mean.max() < 0.02, (
        f"RWKV-{version}: bfloat16 within {mean.max():.2%} (single steps {step.max():.2%})"
    )


@pytest.mark.parametrize("version", MODELS)
@pytest.mark.parametrize("form", [True, "unroll"])
def test_gradients_of_stacked_layers(version, form):
    """In a loop over layers kernels read and write slices of residuals. Against layers one by one."""
    config, model = MODELS[version]
    options = dict(vocab_size=64, hidden_size=128, num_layers=4, remat="dense")
    apart, stacked = model(config(**options)), model(config(**options, scan_layers=form))
    tokens = jax.random.randint(jax.random.key(1), (4, 257), 0, 64)
    params = initial_params(apart, jax.random.key(0))
    spread = lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape)  # no zeros
    params = jax.tree.map(spread, params)

    def gradient(model, params):
        def loss(params):
            return cross_entropy(model.apply({"params": params}, tokens[:, :-1])[0], tokens[:, 1:])

        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(loss))(params)

    want, wanted = gradient(apart, params)
    got, found = gradient(stacked, stack_layers(params))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(unstack_layers(found)), strict=True
    ):
        error = jnp.linalg.norm(a - b) / jnp.linalg.norm(a)
        assert error < 1e-3, (jax.tree_util.keystr(path), float(error))
