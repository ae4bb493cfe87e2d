"""LoRA beside the projections: against merged weights, in training, dropout, DoRA, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small
from flax.traverse_util import flatten_dict, unflatten_dict
from harness import tiers

from fla_jax.layers import RWKV7FeedForward
from fla_jax.models import stack_layers
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import init_lora, lora_loss, merge_lora, next_token_loss, token_logprobs

TOKENS = small.tokens(2, 7)


def filled(lora, seed=5):
    """The pairs with random numbers instead of the zeros of B and the first magnitudes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.2 * jnp.asarray(rng.normal(size=x.shape), x.dtype), lora)


def merged(params, lora, alpha):
    """The textbook's W + alpha / R A B, times m / |.| with DoRA, in float64."""
    flat = flatten_dict(jax.tree.map(np.float64, params), sep="/")
    for path, pair in flatten_dict(lora, sep="/").items():
        a, b = np.float64(pair.a), np.float64(pair.b)
        w = flat[path + "/kernel"] + alpha / a.shape[-1] * a @ b
        if pair.magnitude is not None:
            w = w * np.float64(pair.magnitude) / np.sqrt((w**2).sum(-2, keepdims=True))
        flat[path + "/kernel"] = w
    return jax.tree.map(jnp.float32, unflatten_dict(flat, sep="/"))


@pytest.mark.parametrize(
    "version, options",
    tiers.first([(7, {"dora": True}), (6, {}), (7, {})], 1, (tiers.SLOW, tiers.ONE_PYTHON)),
)
def test_against_merged_weights(version, options):
    model = small.model(version)
    params = small.params(model)
    lora = init_lora(params, jax.random.key(0), rank=3, alpha=6.0, **options)
    apply = jax.jit(model.apply)
    run = lambda lora: apply({"params": params, "lora": lora}, TOKENS)[0]
    plain = apply({"params": params}, TOKENS)[0]
    small.assert_close(run(lora), plain)
    want = merged(params, filled(lora), 6.0)
    assert small.largest_error(plain, run(filled(lora))) > 0.1
    small.assert_close(run(filled(lora)), apply({"params": want}, TOKENS)[0], 3e-5)
    small.assert_close(merge_lora(params, filled(lora)), want)


@pytest.mark.parametrize("dora", [False, True])
def test_merging_with_float64(dora):
    """The sum is rounded as float64, though the pairs are float32."""
    with jax.enable_x64(True):
        kernel = np.random.default_rng(0).normal(size=(32, 16))
        params = {"blocks_0": {"att": {"key": {"kernel": jnp.asarray(kernel)}}}}
        lora = filled(init_lora(params, jax.random.key(0), rank=2, alpha=3.0, dora=dora))
        got = merge_lora(params, lora)["blocks_0"]["att"]["key"]["kernel"]
    pair = jax.tree.map(np.float64, lora["blocks_0"]["att"]["key"])
    want = kernel + 1.5 * pair.a @ pair.b
    if dora:
        want *= pair.magnitude / np.sqrt((want**2).sum(0))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_stacked_layers():
    """A loop over layers that recomputes them has the numbers of separate ones."""
    model, stacked = small.model(7), small.model(7, scan_layers=True, remat=True)
    params = small.params(model)
    lora = filled(
        init_lora(stack_layers(params), jax.random.key(0), rank=2, targets=("*/att/*", "*/ffn/key"))
    )
    apart = {f"blocks_{i}": jax.tree.map(lambda x, i=i: x[i], lora["blocks"]) for i in range(2)}
    want, pull = jax.vjp(lambda q: model.apply({"params": params, "lora": q}, TOKENS)[0], apart)
    run = lambda q: stacked.apply({"params": stack_layers(params), "lora": q}, TOKENS)[0]
    got, pull_stacked = jax.vjp(run, lora)
    small.assert_close(got, want)
    grads = pull(jnp.ones_like(want))[0]
    wanted = {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *grads.values())}
    small.assert_close(pull_stacked(jnp.ones_like(got))[0], wanted, 1e-4)


@pytest.mark.slow
def test_gradients_are_those_of_merged_weights():
    model = small.model(7, num_layers=1)
    params = small.params(model)
    lora = filled(init_lora(params, jax.random.key(0), rank=2, targets=("*/value",), alpha=4.0))
    run = lambda lora: token_logprobs(model, params, TOKENS, lora=lora).sum()

    def merged_run(lora):
        flat = flatten_dict(params, sep="/")
        for path, pair in flatten_dict(lora, sep="/").items():
            flat[path + "/kernel"] += 2.0 * pair.a @ pair.b
        return token_logprobs(model, unflatten_dict(flat, sep="/"), TOKENS).sum()

    small.assert_close(jax.jit(jax.grad(run))(lora), jax.jit(jax.grad(merged_run))(lora), 1e-4)


def test_training():
    """`TrainStep` trains the pairs of bfloat16 parameters; the loss is that of the merged ones."""
    model = small.model(7, num_layers=1, param_dtype="bfloat16")
    params = small.params(model)
    lora = init_lora(params, jax.random.key(0), rank=4)
    assert params["blocks_0"]["att"]["key"]["kernel"].dtype == jnp.bfloat16
    step = TrainStep(
        model,
        optax.adam(1e-2),
        make_mesh(devices=jax.devices()[:1]),
        lora_loss(model),
        params=lora,
        frozen=params,
        metrics=("loss", "tokens"),
    )
    state, losses = step.start(lora), []
    for _ in range(4):
        state, metrics = step(state, step.shard(TOKENS))
        losses.append(float(metrics["loss"]))
    assert metrics["tokens"] == TOKENS[:, 1:].size
    assert losses[0] == pytest.approx(float(next_token_loss(model)(params, TOKENS)), rel=1e-6)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    pair = state.params["blocks_0"]["att"]["key"]
    assert pair.a.dtype == jnp.float32 and (pair.scale, pair.dropout) == (2.0, 0.0)
    want = next_token_loss(model)(jax.tree.map(jnp.float32, params), TOKENS)
    assert step.evaluate(state, [TOKENS]) < want
    assert merge_lora(params, state.params)["blocks_0"]["att"]["key"]["kernel"].dtype == jnp.bfloat16


def test_no_merged_copy():
    """The compiled gradient multiplies by A and B and makes no matrix of the kernel's shape."""
    model = small.model(7, num_layers=1, hidden_size=64, intermediate_size=224)
    params = small.shapes(model, TOKENS)
    lora = jax.eval_shape(lambda params: init_lora(params, jax.random.key(0), targets=("*/ffn/*",)), params)
    loss = lambda lora, params, tokens: lora_loss(model)(lora, tokens, frozen=params)
    text = jax.jit(jax.grad(loss)).lower(lora, params, TOKENS).as_text()
    made = [line for line in text.splitlines() if "-> tensor<64x224x" in line or "-> tensor<224x64x" in line]
    assert not [line for line in made if "dot_general" in line]


def test_dropout():
    """The mean over keys is the output without dropout; a layer's last projection is linear."""
    layer = RWKV7FeedForward(hidden_size=32, intermediate_size=16)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 32)), jnp.float32)
    params = small.draw(small.shapes(layer, x))
    lora = init_lora({"blocks": params}, jax.random.key(0), targets=("*/value",), dropout=0.25)
    variables = {"params": params, "lora": filled(lora["blocks"])}
    run = lambda **options: layer.apply(variables, x, **options)[0]
    keys = jax.random.split(jax.random.key(1), 1000)
    drawn = jax.jit(jax.vmap(lambda key: run(rngs={"dropout": key})))(keys)
    spread = np.asarray(drawn).std(0)
    assert spread.min() > 0.01
    assert (np.abs(drawn.mean(0) - run()) < 4 * spread / np.sqrt(len(keys))).all()


def test_errors():
    params = small.params(small.model(7))
    for options, match in (
        (
            {"targets": ("*/att/nothing",)},
            "targets must match projections such as blocks_0/att/.*, got '.*nothing'",
        ),
        ({"targets": ("head",)}, "targets must match projections"),
        ({"rank": 0}, "rank must be an integer >= 1, got 0"),
        ({"dropout": 1.0}, "dropout must be below 1"),
        ({"alpha": -1}, "alpha must be"),
    ):
        with pytest.raises(ValueError, match=match):
            init_lora(params, jax.random.key(0), **options)
    lora = init_lora(params, jax.random.key(0), targets=("blocks_1/att/key",))
    with pytest.raises(ValueError, match="got one for blocks_1/att/key"):
        merge_lora({"blocks_0": params["blocks_0"]}, lora)


def test_pairs_that_nothing_reads_are_refused():
    """Those of the other layout of layers, of layers that the model lacks, and of the head."""
    separate, stacked = small.model(7), small.model(7, scan_layers=True)
    params = small.params(separate)
    lora = init_lora(params, jax.random.key(0), targets=("*/att/key",))
    beyond = {"blocks_2": lora["blocks_0"]}
    head = {"head": lora["blocks_0"]["att"]["key"]}
    for model, pairs, message in (
        (stacked, lora, r"blocks_0/att/key: use stack_layers\(lora\)"),
        (separate, stack_layers(lora), r"blocks/att/key: use unstack_layers\(lora\)"),
        (separate, beyond, "blocks_2/att/key"),
        (separate, head, "head"),
    ):
        frozen = stack_layers(params) if model is stacked else params
        with pytest.raises(ValueError, match=f"lora must have pairs for .*, got one for {message}"):
            jax.eval_shape(lora_loss(model), pairs, TOKENS, frozen=frozen)
        jax.eval_shape(lora_loss(model), {}, TOKENS, frozen=frozen)
