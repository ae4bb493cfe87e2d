"""FP8 products: against NumPy with ml_dtypes, against Flax's own training state, and through files."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import small_models as small
from flax.training.train_state import TrainState
from grain import MapDataset
from harness import tiers
from harness.compare import assert_same_bits
from jax.sharding import PartitionSpec as P

from fla_jax.checkpoints import load_checkpoint, save_checkpoint
from fla_jax.data import pack_documents
from fla_jax.layers import FP8_SCALES, Layer, RWKV7FeedForward
from fla_jax.layers.base import LayerCall
from fla_jax.layers.init import orthogonal
from fla_jax.layers.sharding import ActivationSharding
from fla_jax.models import stack_layers
from fla_jax.parallel import CarriedTrainState, FP8TrainState, TrainStep, make_mesh
from fla_jax.training import TrainingCheckpoints, init_lora, lora_loss, next_token_loss

OPERANDS = {"input": ml_dtypes.float8_e4m3fn, "kernel": ml_dtypes.float8_e4m3fn}
FORMATS = {**OPERANDS, "output_grad": ml_dtypes.float8_e5m2}


class Projection(Layer):
    """One dense projection of a layer."""

    @nn.compact
    def __call__(self, x):
        call = LayerCall(self, x, x[:, 0], None, None, None, ActivationSharding.of(x))
        return call.dense("key", 24, orthogonal(1.0), ("embed", "mlp"), x)


def rounded(x, kind, scale):
    """``x / scale`` rounded to the format, in float64 and multiplied by the scale again."""
    most = np.float32(ml_dtypes.finfo(FORMATS[kind]).max)
    q = np.clip(np.float32(x) / np.float32(scale), -most, most).astype(FORMATS[kind])
    return q.astype(np.float64) * np.float64(scale)


def test_products_and_scales_against_numpy():
    """Three steps with other inputs: forward, both gradients, amax histories and scales."""
    layer, rng = Projection(hidden_size=32, fp8=True), np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    variables = layer.init(jax.random.key(0), draw(2, 8, 32))
    f = jax.jit(lambda v, x, w: layer.apply({**v, "params": {"key": {"kernel": w}}}, x))
    seen = {kind: [] for kind in FORMATS}
    for factor in (1.0, 5.0, 0.2):
        x, w, dy = factor * draw(2, 8, 32), draw(32, 24), 1e-6 * factor * draw(2, 8, 24)
        y, pull = jax.vjp(f, variables, x, w)
        new, dx, dw = pull(dy)
        # the scale follows from the steps before, the history from this one too
        scales = {
            kind: np.float32(max(amax) / float(ml_dtypes.finfo(FORMATS[kind]).max)) if amax else 1.0
            for kind, amax in seen.items()
        }
        arrays = {"input": x.reshape(-1, 32), "kernel": w, "output_grad": dy.reshape(-1, 24)}
        qx, qw, qdy = (rounded(arrays[kind], kind, scales[kind]) for kind in FORMATS)
        for got, want in ((y, qx @ qw), (dx, qdy @ qw.T), (dw, qx.T @ qdy)):
            np.testing.assert_allclose(
                np.asarray(got).reshape(want.shape), want, rtol=1e-5, atol=1e-6 * np.abs(want).max()
            )
        exact = arrays["input"].astype(np.float64) @ w
        if seen["input"] and factor < 5:  # nothing is clipped: each operand is off by at most 1 / 16
            bound = (2 / 16 + 1 / 256) * (np.abs(arrays["input"]) @ np.abs(w)) + 1e-2
            error = np.abs(np.asarray(y).reshape(exact.shape) - exact)
            assert (error < bound).all() and error.max() > 1e-2 * np.abs(exact).max()
        (found,) = new[FP8_SCALES]["key"].values()
        for kind in FORMATS:
            seen[kind].append(np.abs(arrays[kind]).max())
            history = np.asarray(found[f"{kind}_amax_history"])
            assert history.shape == (1024,) and history[0] == seen[kind][-1]
            np.testing.assert_array_equal(np.sort(history[history > 0]), np.sort(seen[kind]))
            np.testing.assert_allclose(found[f"{kind}_scale"], [scales[kind]], rtol=1e-6)
        variables = new


@functools.cache
def trained(version=7, scan_layers=False, remat=False, accumulate=1, steps=3):
    """Losses and the state of a `TrainStep` after some steps, from equal parameters."""
    model = small.model(version, fp8=True, scan_layers=scan_layers, remat=remat)
    params = small.params(small.model(version))
    mesh = make_mesh(devices=jax.devices()[:1])
    step = TrainStep(model, optax.adam(1e-3), mesh, accumulate=accumulate)
    state, losses = step.start(stack_layers(params) if scan_layers else params), []
    for seed in range(steps):
        state, loss = step(state, step.shard(np.asarray(small.tokens(4, 17, seed))))
        losses.append(float(loss))
    return losses, state


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_step_is_that_of_flax(version):
    """`flax.training.train_state.TrainState` replaces the collection by its gradient; so does `TrainStep`."""
    model = small.model(version, fp8=True)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    variables |= {"params": small.params(small.model(version))}
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-3))
    loss = next_token_loss(model)

    @jax.jit
    def train(state, tokens):
        loss_of = lambda v: loss(v["params"], tokens, fp8_scales=v[FP8_SCALES])
        value, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), value

    losses, ours = trained(version)
    for seed, found in enumerate(losses):
        state, value = train(state, small.tokens(4, 17, seed))
        assert found == pytest.approx(float(value), rel=1e-6)
    assert isinstance(ours, FP8TrainState)
    assert small.largest_error(ours.fp8_scales, state.params[FP8_SCALES]) < 1e-5
    assert small.largest_error(ours.params, state.params["params"]) < 1e-5
    # r, k, v, output (and gate), and two (and receptance) of the feed-forward
    block = ours.fp8_scales["blocks_1"]
    assert (len(block["att"]), len(block["ffn"])) == ((5, 3) if version == 6 else (4, 2))
    plain = float(loss(ours.params, small.tokens(4, 17, 2)))
    rounded_loss = float(loss(ours.params, small.tokens(4, 17, 2), fp8_scales=ours.fp8_scales))
    assert 1e-6 < abs(rounded_loss / plain - 1) < 1e-2


@pytest.mark.parametrize(
    "scan_layers, remat",
    tiers.first(
        [(True, False), (False, "dense"), (False, True), (True, True), (True, "dense"), ("unroll", False)], 2
    ),
)
def test_forms_of_a_model(scan_layers, remat):
    losses, state = trained(scan_layers=scan_layers, remat=remat)
    want_losses, want = trained()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    scales = stack_layers(want.fp8_scales) if scan_layers else want.fp8_scales
    assert small.largest_error(state.fp8_scales, scales) < 1e-5


@pytest.mark.slow
def test_microbatches():
    """A scale is that of the largest value of all; gradients are those of a mean over half as many labels."""
    (_, whole), (_, halves) = trained(steps=1), trained(steps=1, accumulate=2)
    names = [f"{kind}_amax_history" for kind in FORMATS]
    for block in ("blocks_0", "blocks_1"):
        for path in (("att", "key"), ("att", "output"), ("ffn", "key"), ("ffn", "value")):
            (want,), (got,) = (x.fp8_scales[block][path[0]][path[1]].values() for x in (whole, halves))
            # only the gradient of the last product comes through no rounded one
            is_last = (block, *path) == ("blocks_1", "ffn", "value")
            for name, factor in zip(names, (1, 1, 2)) if is_last else zip(names[:2], (1, 1)):
                np.testing.assert_allclose(got[name][0], factor * want[name][0], rtol=1e-5)


@pytest.mark.slow
def test_resumed_run(tmp_path):
    model = small.model(7, fp8=True, scan_layers=True, dtype="bfloat16")
    step = TrainStep(model, optax.adam(1e-3), make_mesh(devices=jax.devices()[:1]))
    run = lambda state, seed: step(state, step.shard(np.asarray(small.tokens(2, 9, seed))))[0]
    state = run(run(step.init(jax.random.key(0)), 0), 1)
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        restored, _ = checkpoints.restore(step.abstract_state())
    assert_same_bits(run(restored, 2), run(state, 2))


@pytest.mark.slow
def test_carried_states():
    model = small.model(7, fp8=True)
    mesh = make_mesh(devices=jax.devices()[:1])
    step = TrainStep(model, optax.sgd(0.1), mesh, carry_sequences=2)
    state = step.init(jax.random.key(0))
    assert isinstance(state, CarriedTrainState) and isinstance(state, FP8TrainState)
    documents = MapDataset.source([np.arange(1, 20), np.arange(2, 23), np.arange(1, 18)])
    for batch in pack_documents(documents, 8, 2, carry_state=True):
        state, loss = step(state, step.shard(batch))
        assert np.isfinite(loss) and np.abs(state.carry.wkv).max() > 0
    assert min(float(x.max()) for x in jax.tree.leaves(state.fp8_scales)) > 0


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_parameters_alone_are_the_model(version, tmp_path):
    """Initial values, files and outputs are those of a model without FP8."""
    plain, model = small.model(version), small.model(version, fp8=True)
    tokens = small.tokens(2, 9)
    variables, want = model.init(jax.random.key(0), tokens), plain.init(jax.random.key(0), tokens)
    assert set(variables) == {"params", FP8_SCALES} and set(want) == {"params"}
    assert_same_bits(variables["params"], want["params"])
    _, state = trained(version)
    outputs = plain.apply({"params": state.params}, tokens)
    assert_same_bits(model.apply({"params": state.params}, tokens), outputs)
    for name, fp8 in (("model.pth", False), ("native", True)):
        save_checkpoint(tmp_path / name, model, state.params)
        loaded, params = load_checkpoint(tmp_path / name)
        assert loaded.config.fp8 is fp8
        assert_same_bits(params, state.params)
        assert_same_bits(loaded.apply({"params": params}, tokens), outputs)


def test_errors():
    with pytest.raises(TypeError, match="fp8 must be a bool, got 1"):
        small.model(7, fp8=1)
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32 with fp8=True, got float16"):
        small.model(7, fp8=True, dtype="float16")
    layer = RWKV7FeedForward(hidden_size=32, param_dtype=jnp.float16, fp8=True)
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32 with fp8=True, got float16"):
        layer.init(jax.random.key(0), jnp.ones((1, 2, 32), jnp.float16))
    model, mesh = small.model(7, fp8=True), make_mesh(devices=jax.devices()[:1])
    params = small.params(small.model(7))
    lora = init_lora(params, jax.random.key(0))
    with pytest.raises(ValueError, match="fp8 must be False in the model's config where params= are trained"):
        TrainStep(model, optax.sgd(1.0), mesh, lora_loss(model), params=lora, frozen=params)
    step = TrainStep(model, optax.sgd(1.0), make_mesh(devices=jax.devices()[:1], explicit=True))
    with pytest.raises(ValueError, match="fp8 must be False on a mesh with explicit axes"):
        step(step.start(params), step.shard(np.asarray(small.tokens(2, 9))))
    variables = model.init(jax.random.key(0), small.tokens(1, 2))
    apply = jax.shard_map(
        lambda tokens: model.apply(variables, tokens)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(ValueError, match=r"fp8 must be False inside jax.shard_map"):
        apply(np.asarray(small.tokens(2, 9)))


def test_scales_of_a_model_without_fp8():
    """They are ignored."""
    model, tokens = small.model(7, fp8=True), small.tokens(2, 9)
    variables = model.init(jax.random.key(0), tokens)
    plain = small.model(7)
    assert_same_bits(plain.apply(variables, tokens), plain.apply({"params": variables["params"]}, tokens))
