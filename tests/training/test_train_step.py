"""`TrainStep` on one device: accumulation and evaluation of any loss, against optax and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small
from flax.core import freeze

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


def test_accumulation_in_float64():
    """Thirds, of whole numbers as weights in float32, are not rounded to float32."""
    with small.float64():
        rows, mesh = np.random.default_rng(0).normal(size=(6, 4)), make_mesh(devices=jax.devices()[:1])
        options = dict(weight=lambda batch: jnp.float32(len(batch)), accumulate=3)
        square = lambda p, batch: jnp.mean((batch - p["a"]) ** 2)
        params = {"a": jnp.zeros(4, jnp.float64)}
        step = TrainStep(small.model(7), optax.sgd(1.0), mesh, square, params=params, **options)
        state, value = step(step.start(params), rows)
        np.testing.assert_allclose(value, np.mean(rows**2), rtol=1e-14)
        np.testing.assert_allclose(state.params["a"], rows.mean(0) / 2, rtol=1e-13)


def test_a_frozen_dict_of_other_arrays_and_a_batch_without_axes():
    vectors = freeze({"a": jnp.ones(3)})
    mesh = make_mesh(devices=jax.devices()[:1])
    step = TrainStep(small.model(7), optax.sgd(1.0), mesh, lambda p, batch: p["a"] @ batch[0], params=vectors)
    state, value = step(step.start(vectors), step.shard(ROWS))
    np.testing.assert_allclose(value, ROWS[0].sum(), rtol=1e-6)
    np.testing.assert_allclose(state.params["a"], 1 - ROWS[0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"batch must contain arrays \[B, ...\] alone, got"):
        step.shard((ROWS, np.float32(1)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_evaluation_weighs_batches(make, accumulate):
    step, params = make
    each = np.asarray(loss(params, (ROWS, WEIGHTS))[1]["each"])
    batches = [(ROWS[:4], WEIGHTS[:4]), (ROWS[4:], WEIGHTS[4:])]
    state = step(accumulate).start(params)
    found = step(accumulate).evaluate(state, batches)
    assert found == pytest.approx(np.average(each, weights=WEIGHTS), rel=1e-6)
    with pytest.raises(ValueError, match="batches must have at least one batch"):
        step(accumulate).evaluate(state, iter(()))


@pytest.mark.parametrize("weights", [[1, 0.5, -1, 2], [1, 2, -1, -2], [0, 1, 0, 2]])
def test_weights_that_cancel(make, weights):
    """The weights of a microbatch, of a batch or of all sum to 0, though single ones do not."""
    model, mesh, x, weights = make[0](1).model, make[0](1).mesh, ROWS[:4], np.float32(weights)

    def weighted(vector, batch):
        total = batch[1].sum()
        return jnp.sum(jnp.tanh(batch[0] @ vector) * batch[1]) / jnp.where(total != 0, total, 1)

    vector = jnp.float32([1, 2, 3])
    want, grad = jax.value_and_grad(weighted)(vector, (x, weights))
    options = dict(params=vector, weight=lambda batch: jnp.sum(batch[1]), accumulate=2)
    step = TrainStep(model, optax.sgd(1.0), mesh, weighted, **options)
    state = step.start(vector)
    assert step.evaluate(state, [(x, weights)]) == pytest.approx(float(want), rel=1e-5)
    halves = [(x[at::2], weights[at::2]) for at in (0, 1)]  # each a batch of two microbatches
    assert step.evaluate(state, halves) == pytest.approx(float(want), rel=1e-5)
    state, value = step(state, (x, weights))
    assert value == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(vector - state.params, grad, rtol=1e-4, atol=1e-6)


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
    with pytest.raises(ValueError, match="metrics must be of loss, grad_norm, tokens, got 'speed'"):
        TrainStep(step(1).model, optax.sgd(1.0), step(1).mesh, metrics=("speed",))


def test_dtypes_are_the_models_or_those_of_params(make):
    """The state is always that of `abstract_state`, which a resumed run restores."""
    step, params = make[0](1), make[1]
    mixed = {**params, "head": {"kernel": params["head"]["kernel"].astype(jnp.bfloat16)}}
    with pytest.raises(
        ValueError, match=r"head/kernel must have dtype float32, got bfloat16; use .*float32'"
    ):
        step.start(mixed)
    step = TrainStep(step.model, optax.adam(1.0), step.mesh, params=mixed)
    state = step.start(mixed)
    assert small.kinds(step.abstract_state()) == small.kinds(state)
    assert state.params["head"]["kernel"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"head/kernel must have dtype bfloat16, got float32; .* params$"):
        step.start(params)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_metrics_by_name(make, accumulate):
    step, params = make
    options = dict(weight=lambda batch: jnp.sum(batch[1]), has_aux=True, accumulate=accumulate)
    named = TrainStep(
        step(1).model, optax.sgd(1.0), step(1).mesh, loss, metrics=("loss", "grad_norm", "tokens"), **options
    )
    (want, _), grads = jax.value_and_grad(loss, has_aux=True)(params, (ROWS, WEIGHTS))
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))
    _, metrics = named(named.start(params), (ROWS, WEIGHTS))
    assert {*metrics} == {"loss", "grad_norm", "tokens", "aux"}
    assert metrics["tokens"] == WEIGHTS.sum() and metrics["aux"]["each"].size == 8
    assert metrics["loss"] == pytest.approx(float(want), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_trained_what_is_frozen_and_keys(make, accumulate):
    """A vector instead of the model's parameters; the loss gets frozen rows and a key a microbatch."""
    model, mesh, rng = make[0](1).model, make[0](1).mesh, jax.random.key(3)
    draw = lambda key: jax.random.uniform(key, (3,))

    def noisy(vector, batch, *, frozen, key=None):
        return jnp.mean((batch + frozen) @ vector) + (0 if key is None else draw(key) @ vector)

    vector, shift = jnp.float32([1, 2, 3]), jnp.float32([0, 1, 0])
    options = dict(params=vector, frozen=shift, rng=rng, accumulate=accumulate, donate=False)
    step = TrainStep(model, optax.sgd(1.0), mesh, noisy, **options)
    state, want = step.start(vector), np.asarray(vector, np.float64)
    value = float((ROWS + np.asarray(shift)).mean(0) @ want)
    assert step.evaluate(state, [ROWS]) == pytest.approx(value, rel=1e-5)
    for at in range(2):
        key = jax.random.fold_in(rng, at)
        keys = [key] if accumulate == 1 else jax.random.split(key, accumulate)
        want = want - (ROWS + np.asarray(shift)).mean(0) - np.mean([draw(key) for key in keys], 0)
        before, (state, _) = state, step(state, ROWS)
        np.testing.assert_allclose(state.params, want, rtol=1e-5)
        assert not before.params.is_deleted()
    assert small.kinds(step.abstract_state()) == small.kinds(state)
    with pytest.raises(ValueError, match="init draws the model's parameters"):
        step.init(rng)
    with pytest.raises(ValueError, match="shape"):
        step.start(vector[:2])
