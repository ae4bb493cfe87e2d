"""`TrainStep` on one device: accumulation and evaluation of any loss, against optax and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small

from fla_jax.parallel import TrainStep, make_mesh

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
WEIGHTS = np.float32([0, 3, 1, 2, 0, 0, 1, 1])


def loss(params, batch):
    """A weighted mean; it compiles in no time, and gradients of models are in losses_run.py."""
    x, weights = batch
    each = jnp.mean((x - jnp.tanh(params["head"]["kernel"]).mean()) ** 2, -1)
    return jnp.sum(each * weights) / jnp.maximum(weights.sum(), 1), {"each": each, "largest": each.max()}


@pytest.fixture(scope="module")
def make():
    model = small.model(7, num_layers=1)
    mesh = make_mesh(devices=jax.devices()[:1])
    options = dict(weight=lambda batch: jnp.sum(batch[1]), has_aux=True)
    step = functools.cache(lambda n: TrainStep(model, optax.sgd(1.0), mesh, loss, accumulate=n, **options))
    return step, small.params(model)


def test_accumulation_of_any_loss(make):
    """The microbatches have unequal weights; aux outputs are stacked, sequence i in i % 2."""
    step, params = make
    batch = ROWS, WEIGHTS
    (want, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    state, (value, stacked) = step(2)(step(2).start(params), batch)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    got = params["head"]["kernel"] - state.params["head"]["kernel"]
    np.testing.assert_allclose(got, grads["head"]["kernel"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(stacked["each"], aux["each"].reshape(4, 2).T, rtol=1e-6)
    assert stacked["largest"].shape == (2,)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_evaluation_weighs_batches(make, accumulate):
    step, params = make
    each = np.asarray(loss(params, (ROWS, WEIGHTS))[1]["each"])
    batches = [(ROWS[:4], WEIGHTS[:4]), (ROWS[4:], WEIGHTS[4:])]
    found = step(accumulate).evaluate(params, batches)
    assert found == pytest.approx(np.average(each, weights=WEIGHTS), rel=1e-6)
    assert step(accumulate).evaluate(params, []) == 0


def test_shapes_and_rows(make):
    step, _ = make
    shapes, state = step(1).abstract_state(), step(1).init(jax.random.key(0))
    assert small.kinds(shapes) == small.kinds(state)
    assert jax.tree.map(lambda x: x.sharding, shapes) == step(1).shardings
    assert step(2).local_batch_rows(4) == [0, 1, 2, 3]
    size = r"batch must have a size B that is a multiple of .* = 1 \* 1 = 1, times accumulate = 2, got 3"
    for call in (step(2).local_batch_rows, lambda size: step(2).shard((ROWS[:size], WEIGHTS[:size]))):
        with pytest.raises(ValueError, match=size):
            call(3)
    with pytest.raises(ValueError, match="accumulate must be an integer >= 1, got 0"):
        step(0)
