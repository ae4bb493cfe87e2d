"""Losses and accumulated gradients on eight fake devices, and the same on one: for test_on_devices.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_models as small
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fla_jax.parallel import TrainStep, make_mesh, parameter_shardings
from fla_jax.training import (
    chunked_cross_entropy,
    chunked_loss,
    init_lora,
    lora_loss,
    next_token_loss,
    token_logprobs,
    truncated_value_and_grad,
)


def cross_entropy(hidden, kernel, labels):
    return chunked_cross_entropy(hidden, kernel, labels, block_tokens=16)


def head_arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 6, 8)), rng.normal(size=(8, 10)), rng.integers(0, 10, (8, 6))


def over_the_batch():
    """For each kind of mesh the largest error, and the sharding of hidden's gradient."""
    arrays = head_arrays()
    run, found = jax.jit(jax.value_and_grad(cross_entropy, (0, 1))), {}
    want = run(*arrays)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            specs = P("data"), P(), P("data")
            got = run(*(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)))
        found[kind.name] = small.largest_error(got, want), got[1][0].sharding.spec
    return found


def in_shard_map():
    """Errors of losses in `jax.shard_map` with its default check, parameters replicated, the batch split."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = small.model(7, num_layers=1, implementation="reference", dtype="float64", param_dtype="float64")
    params, tokens = small.params(model), small.tokens(8, 9)
    truncated = truncated_value_and_grad(model, chunk_size=2, chunks_per_gradient=2)
    mean = lambda x: jax.lax.pmean(x, "data") if jax.typeof(x).manual_axis_type.varying else x / 8

    def split(fn, *specs):
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P()))

    hidden, kernel, labels = head_arrays()
    head = lambda mean: lambda h, k, y: mean(cross_entropy(h, k, y))
    long = lambda mean: lambda p, t: mean(chunked_loss(model, p, t, chunk_size=4)[0])
    none = lambda x: x
    groups = lambda p, t: (truncated(p, t)[0][0], truncated(p, t)[1])
    gradients = lambda fn, *argnums: jax.jit(jax.value_and_grad(fn, argnums))
    return {
        "chunked_cross_entropy": small.largest_error(
            gradients(split(head(mean), P("data"), P(), P("data")), 0, 1)(hidden, kernel, labels),
            gradients(head(none), 0, 1)(hidden, kernel, labels),
        ),
        "chunked_loss": small.largest_error(
            gradients(split(long(mean), P(), P("data")), 0)(params, tokens),
            gradients(long(none), 0)(params, tokens),
        ),
        "truncated_value_and_grad": small.largest_error(
            split(lambda p, t: jax.tree.map(mean, groups(p, t)), P(), P("data"))(params, tokens),
            jax.jit(groups)(params, tokens),
        ),
    }


def accumulated():
    """Errors of a step and of an evaluation in microbatches on each mesh, against optax on one device."""
    model = small.model(7, num_layers=1, implementation="reference", dtype="float64", param_dtype="float64")
    loss, params, tokens = next_token_loss(model), small.params(model), small.tokens(16, 9)
    mask = np.random.default_rng(0).uniform(size=(16, 8)) * (np.arange(16)[:, None] % 5 > 0)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}
    value, grads = jax.jit(jax.value_and_grad(loss))(params, batch)
    found = {}
    for name, explicit in (("auto", False), ("explicit", True)):
        step = TrainStep(
            model,
            optax.sgd(1.0),
            make_mesh(data=2, fsdp=2, tensor=2, explicit=explicit),
            accumulate=2,
            metrics=("loss", "grad_norm", "tokens"),
        )
        first = step.start(params)
        evaluated = step.evaluate(first, [batch, batch])
        state, got = step(first, step.shard(batch))
        wanted = {"loss": value, "grad_norm": optax.tree.norm(grads), "tokens": np.sum(mask)}
        after = jax.tree.map(jnp.subtract, params, grads)
        assert jax.tree.map(lambda x: x.sharding, state.params) == step.shardings.params
        found[name] = small.largest_error((got, evaluated, state.params), (wanted, value, after))
    return found


def tuned():
    """Errors of a LoRA step with DoRA, and of log-probabilities, on each mesh, against one device."""
    model = small.model(7, num_layers=1, implementation="reference", dtype="float64", param_dtype="float64")
    params, tokens, rng = small.params(model), small.tokens(8, 9), np.random.default_rng(0)
    lora = init_lora(params, jax.random.key(0), rank=4, dora=True)
    lora = jax.tree.map(lambda x: jnp.asarray(x + 0.2 * rng.normal(size=x.shape)), lora)
    loss, found = lora_loss(model), {}
    value, grads = jax.jit(jax.value_and_grad(lambda q: loss(q, tokens, frozen=params)))(lora)
    logprobs = lambda p, q, t: token_logprobs(model, p, t, lora=q, block_tokens=16)
    wanted = {"loss": value}, jax.tree.map(jnp.subtract, lora, grads), jax.jit(logprobs)(params, lora, tokens)
    for name, explicit in (("auto", False), ("explicit", True)):
        mesh = make_mesh(fsdp=2, tensor=2, sequence=2, explicit=explicit)
        frozen = jax.device_put(params, parameter_shardings(model, mesh))
        options = {"params": lora, "frozen": frozen, "metrics": ("loss",), "donate": False}
        step = TrainStep(model, optax.sgd(1.0), mesh, loss, **options)
        first, batch = step.start(lora), step.shard(tokens)
        state, got = step(first, batch)
        rules = () if explicit else step.rules
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            found[name] = jax.jit(logprobs)(frozen, first.params, batch)
        found[name] = small.largest_error((got, state.params, found[name]), wanted)
    return found


def dropped():
    """Errors of a LoRA step with dropout on each mesh against one device, for both models."""
    found = {}
    for version in (6, 7):
        float64 = dict(dtype="float64", param_dtype="float64")
        model = small.model(version, num_layers=1, implementation="reference", **float64)
        params, tokens = small.params(model), small.tokens(8, 9)
        lora = init_lora(params, jax.random.key(0), rank=4, dropout=0.3)
        lora = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(1), x.shape, x.dtype), lora)
        meshes = {
            "one": make_mesh(data=1, devices=jax.devices()[:1]),
            "auto": make_mesh(fsdp=2, tensor=2, sequence=2),
            "explicit": make_mesh(fsdp=4, tensor=2, explicit=True),
        }
        steps = {}
        for name, mesh in meshes.items():
            frozen = jax.device_put(params, parameter_shardings(model, mesh))
            options = {"params": lora, "frozen": frozen, "metrics": ("loss",), "rng": jax.random.key(7)}
            step = TrainStep(model, optax.sgd(1.0), mesh, lora_loss(model), **options)
            state, got = step(step.start(lora), step.shard(tokens))
            steps[name] = jax.device_get((got, state.params))
            found[f"{name} {version}"] = small.largest_error(steps[name], steps["one"])
    return found


def report():
    with small.float64():
        return {
            "batch": over_the_batch(),
            "shard_map": in_shard_map(),
            "accumulated": accumulated(),
            "tuned": tuned(),
            "dropped": dropped(),
        }
