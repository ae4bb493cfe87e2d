"""The recipe: parameter groups, optimiser, schedule; a model that learns."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small

from fla_jax.training import cross_entropy, parameter_groups, rwkv_optimizer, rwkv_schedule, wsd_schedule


def names(tree):
    return {
        tuple(key.key for key in path): value for path, value in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_groups_of_boxed_parameters():
    tokens = jnp.zeros((1, 2), jnp.int32)
    plain, boxed = (
        parameter_groups(small.shapes(small.model(7, scan_layers=True, logical_axes=flag), tokens))
        for flag in (False, True)
    )
    assert nn.meta.unbox(boxed) == plain


def adam(p, grads, lrs, weight_decay, scale):
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(grads, lrs), 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p -= scale * lr * (m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.99**t)) + 1e-18) + weight_decay * p)
    return p


def test_optimizer_steps():
    schedule = rwkv_schedule(1e-2, 1e-3, 6, 2)
    tx = rwkv_optimizer(schedule, weight_decay=0.3)
    start = {
        "att": {"w0": jnp.array([0.5]), "w1": jnp.array([[0.5]]), "key": {"kernel": jnp.array([[0.5]])}},
        "emb": {"embedding": jnp.array([[0.5]])},
    }
    grads = [0.03, -0.2, 0.1, 1e-12]
    params, state = start, tx.init(start)
    for g in grads:
        updates, state = tx.update(jax.tree.map(lambda x, g=g: jnp.full_like(x, g), params), state, params)
        params = optax.apply_updates(params, updates)
    lrs = [float(schedule(i)) for i in range(4)]
    for path, value in names(params).items():
        matrix, base = path[-1] in ("kernel", "embedding"), path[-1] == "w0"
        want = adam(0.5, grads, lrs, 0.3 if matrix else 0.0, 2.0 if base else 1.0)
        np.testing.assert_allclose(float(value.ravel()[0]), want, rtol=1e-6, err_msg=str(path))


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_float16_is_refused(kind):
    """Its first update is NaN where a gradient is 0."""
    params = {"a": jnp.zeros(2), "emb": {"embedding": jnp.zeros(2, jnp.float16)}}
    with pytest.raises(ValueError, match=r"not be float16, got emb/embedding: .*; train in float32"):
        rwkv_optimizer(1.0, kind=kind).init(params)


def test_numbers_out_of_range_are_refused():
    for limit in (-1.0, 0, np.nan):
        with pytest.raises(ValueError, match="clip_norm must be"):
            rwkv_optimizer(1.0, clip_norm=limit)
    for peak, final in ((np.nan, 0.0), (1.0, np.inf), (-1.0, 0.0)):
        with pytest.raises(ValueError, match=r"(peak|final) must be"):
            rwkv_schedule(peak, final, 10, 1)


def test_hyperparameters_may_be_injected():
    params = {"a": jnp.zeros(2)}
    tx = optax.inject_hyperparams(rwkv_optimizer)(0.5, weight_decay=0.0, clip_norm=2.0)
    updates, state = jax.jit(tx.update)({"a": jnp.array([3.0, -4.0])}, tx.init(params), params)
    np.testing.assert_allclose(updates["a"], [-0.5, 0.5], rtol=1e-5)
    assert state.hyperparams["clip_norm"] == 2


def test_clipping_by_the_global_norm():
    """Two steps tell, since Adam forgets the gradient's scale: the clipped one is smaller by 1 / 50."""
    tx = rwkv_optimizer(1.0, weight_decay=0.0)
    params = {"a": jnp.zeros(2)}
    _, state = tx.update({"a": jnp.array([3e1, 4e1])}, tx.init(params), params)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["a"], [0.06, 0.08], rtol=1e-6)
    updates, _ = rwkv_optimizer(1.0, weight_decay=0.0, clip_norm=None).update(
        {"a": jnp.zeros(2)}, tx.init(params), params
    )
    assert not updates["a"].any(), "a zero gradient moves nothing, in spite of eps = 1e-18"


@pytest.mark.parametrize(
    "step, want",
    [
        (0, 0.01),
        (1, 0.01 + 0.99 / 10),
        (9, 0.01 + 0.99 * 9 / 10),
        (10, 1.0),
        (60, 0.55),
        (110, 0.1),
        (500, 0.1),
    ],
)
def test_schedule(step, want):
    np.testing.assert_allclose(rwkv_schedule(6e-4, 6e-5, 110)(step), 6e-4 * want, rtol=1e-5)


def test_schedule_is_the_official_cosine():
    schedule = rwkv_schedule(6e-4, 6e-5, 200, 10)
    for step in range(10, 200, 17):
        progress = (step - 10) / (200 - 10)
        want = 6e-4 * ((0.5 + 0.1 / 2) + (0.5 - 0.1 / 2) * math.cos(math.pi * progress))
        np.testing.assert_allclose(schedule(step), want, rtol=1e-5)
    with pytest.raises(ValueError, match="total_steps"):
        rwkv_schedule(1e-3, 1e-4, 10, 10)
    with pytest.raises(ValueError, match="peak"):
        rwkv_schedule(0.0, 1e-4, 100)


@pytest.mark.parametrize("warmup", [0, 10])
def test_warmup_stable_decay(warmup):
    schedule = wsd_schedule(2.0, 0.5, 100, decay_steps=20, warmup_steps=warmup)
    known = {0: 0.02, 5: 1.01} if warmup else {0: 2.0}
    for step, want in {**known, 10: 2.0, 80: 2.0, 90: 1.25, 100: 0.5, 200: 0.5}.items():
        np.testing.assert_allclose(schedule(step), want, rtol=1e-5)
    for decay in (0, 101 - warmup):
        with pytest.raises(ValueError, match=f"decay_steps must be from 1 to .* got {decay}"):
            wsd_schedule(2.0, 0.5, 100, decay, warmup)


@pytest.mark.slow
def test_a_model_learns():
    """Twenty steps from the official initialisation on one batch, with bfloat16 activations."""
    model = small.model(7, num_layers=1, remat=True, dtype=jnp.bfloat16, implementation="reference")
    tokens = small.tokens(2, 9)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :1])["params"]
    tx = rwkv_optimizer(rwkv_schedule(1e-2, 1e-3, 20, 2))

    def step(params, state):
        loss = lambda p: cross_entropy(model.apply({"params": p}, tokens[:, :-1])[0], tokens[:, 1:])
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step)
    state, losses = tx.init(params), []
    for _ in range(20):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert abs(losses[0] - math.log(24)) < 0.5 and losses[-1] < 0.5 * losses[0], losses
