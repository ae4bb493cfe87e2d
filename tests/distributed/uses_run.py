"""Long contexts, state tuning and generation with sharded parameters. For test_on_devices.py."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import small_models as small
from jax.sharding import PartitionSpec as P

from fla_jax.generation import SamplingParams, generate
from fla_jax.parallel import axis_rules, make_mesh, parameter_shardings
from fla_jax.training import chunked_loss, truncated_value_and_grad, tune_states

GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.0, frequency_penalty=0.0)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8]]


def long(model, params, tokens, mask, state):
    """Exact loss with its gradient, and the truncated ones, which are the same for one group."""
    exact = jax.value_and_grad(
        lambda p, state: chunked_loss(model, p, tokens, mask, state, chunk_size=4)[0], (0, 1)
    )
    cut = truncated_value_and_grad(model, chunk_size=4, chunks_per_gradient=2)
    run = lambda p, state: (exact(p, state), cut(p, tokens, mask, state))
    return jax.jit(run)(params, state)


def tuned(model, params, tokens, mask):
    return tune_states(model, params, [(np.asarray(tokens), np.asarray(mask))] * 2, 2, learning_rate=0.1)


def in_shard_map(model, params, tokens, mesh, check):
    """Hidden states, and the gradients of their sum of squares, with tokens over four devices."""

    def read(params, tokens):
        return model.apply({"params": params}, tokens, method="hidden")[0]

    def loss(read, params):
        hidden = read(params, tokens)
        return jnp.sum(hidden**2), hidden

    split = P("fsdp", "sequence")
    with jax.set_mesh(mesh), nn.logical_axis_rules((("activation_length", "sequence"),)):
        inside = jax.shard_map(read, in_specs=(P(), split), out_specs=split, check_vma=check)
        got = jax.device_get(jax.jit(jax.grad(functools.partial(loss, inside), has_aux=True))(params))
    return got, jax.jit(jax.grad(functools.partial(loss, read), has_aux=True))(params)


def report(version):
    model = small.model(version, vocab_size=32, scan_layers=True)
    # Adam divides gradients by their size: where they are small, what float32 rounds differently is large
    exact = dict(dtype="float64", param_dtype="float64")
    params, state = small.params(model), small.random_state(model, 4)
    tokens = small.tokens(4, 9, seed=2)
    mask = np.random.default_rng(0).uniform(0.5, 1, size=(4, 8)).astype(np.float32)
    want = long(model, params, tokens, mask, state)
    with small.float64():
        wide = small.model(version, vocab_size=32, scan_layers=True, **exact)
        wide_params = small.params(wide)
        want_tuned = tuned(wide, wide_params, tokens, mask)
    text = generate(model, params, PROMPTS, GREEDY, max_tokens=6)

    mesh, found = make_mesh(fsdp=2, sequence=2, tensor=2), {}
    put = jax.device_put(params, parameter_shardings(model, mesh))
    with jax.set_mesh(mesh), nn.logical_axis_rules(axis_rules(model, mesh)):
        found["long"] = small.largest_error(long(model, put, tokens, mask, state), want)
        with small.float64():
            put_wide = jax.device_put(wide_params, parameter_shardings(wide, mesh))
            found["tuned, float64"] = small.largest_error(tuned(wide, put_wide, tokens, mask), want_tuned)
    for name, rules in (("no rules", ()), ("rules", axis_rules(model, mesh, batch=len(PROMPTS)))):
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules) if rules else contextlib.nullcontext():
            got = generate(model, put, PROMPTS, GREEDY, max_tokens=6)
            assert [one.tokens.tolist() for one in got] == [one.tokens.tolist() for one in text], name
            states = ([one.state.rwkv for one in run] for run in (got, text))
            found[f"generated, {name}"] = small.largest_error(*states)
    with jax.enable_x64(True):  # what float32 rounds differently would say little of one layer's gradients
        short = small.model(version, vocab_size=32, num_layers=1, **exact)
        for name, check in (("unchecked", False), ("checked", True)):
            mesh = make_mesh(fsdp=2, sequence=4)
            inside = in_shard_map(short, small.params(short), tokens[:, :8], mesh, check)
            found[f"in shard_map, {name}, float64"] = small.largest_error(*inside)
    return found
