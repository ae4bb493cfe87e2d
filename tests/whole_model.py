"""Gradients of an RWKV-6 with strong decays under a mean loss: kernels' errors beside those of plain JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.models import stack_layers
from fla_jax.pallas.backend import triton
from fla_jax.training import cross_entropy

TOKENS = 2**15  # that the loss is a mean over
LIMITS = (-0.6, -4.8, -8.0)  # of a head's log decays: kernels choose by the strongest how they go about all
Gradients = dict[str, np.ndarray]  # by parameter, with the draws in front
Draws = Sequence[tuple[Any, jax.Array]]  # parameters and tokens [B, T + 1]


def draw(options: Mapping[str, Any], number: int, batch: int, length: int) -> Draws:
    """Random parameters and tokens. From one draw to another the error of a parameter's gradient varies by
    several percent.
    """
    return [(_parameters(options, i), small.tokens(batch, length + 1, seed=i)) for i in range(number)]


def _parameters(options: Mapping[str, Any], seed: int) -> Any:
    """Random ones, of stacked layers, half of the log decays near a limit of the head's."""
    rng = np.random.default_rng(seed)
    params = dict(small.params(small.model(6, **options), small.SEED + seed))
    for name, block in params.items():
        if name.startswith("blocks_"):
            att = block["att"]
            shape = att["time_faaaa"].shape
            near, any_ = rng.uniform(0.9, 1, shape), np.exp(-rng.uniform(0, 6, shape))
            w = rng.choice(LIMITS, (shape[0], 1)) * np.where(rng.random(shape) < 0.5, near, any_)
            att["time_decay"] = jnp.asarray(np.log(-w).reshape(-1), jnp.float32)
            att["time_decay_w2"] *= 0.01
            # layers that add little; and outputs of the recurrence below the group norm's epsilon, which
            # would multiply the rounding of those that happen to be small
            for kernel, gain in ((att["output"], 0.2), (block["ffn"]["value"], 0.2), (att["key"], 0.01)):
                kernel["kernel"] *= gain
    return stack_layers(params)


def gradients(options: Mapping[str, Any], draws: Draws) -> Gradients:
    """Of the losses' sum over all tokens divided by TOKENS."""
    model = small.model(6, scan_layers=True, **options)

    @jax.jit
    @jax.grad
    def gradient(params: Any, tokens: jax.Array) -> jax.Array:
        share = tokens[:, 1:].size / TOKENS
        return cross_entropy(model.apply({"params": params}, tokens[:, :-1])[0], tokens[:, 1:]) * share

    made = [jax.device_get(gradient(params, tokens)) for params, tokens in draws]
    stacked = jax.tree.map(lambda *each: np.stack(each).astype(np.float64), *made)
    return {jax.tree_util.keystr(path): g for path, g in jax.tree_util.tree_leaves_with_path(stacked)}


def plain_gradients(options: Mapping[str, Any], draws: Draws) -> Gradients:
    """`gradients` of plain JAX, the examples one after another, which takes less memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "INTERPRET", True)  # nothing chooses kernels unasked
        examples = [(params, example[None]) for params, tokens in draws for example in tokens]
        made = gradients({**options, "implementation": "xla"}, examples)
    return {name: g.reshape(len(draws), -1, *g.shape[1:]).sum(1) for name, g in made.items()}


def exact_gradients(options: Mapping[str, Any], draws: Draws) -> Gradients:
    wide_options = {**options, "dtype": jnp.float64, "param_dtype": jnp.float64}
    with jax.enable_x64(True):
        widen = lambda x: jnp.asarray(np.asarray(x, np.float64))
        return plain_gradients(wide_options, [(jax.tree.map(widen, p), tokens) for p, tokens in draws])


def check(kernels: Gradients, plain: Gradients, exact: Gradients, least: float) -> None:
    """Every kernel's error, relative to the gradient's norm, is at most ``1.2 * plain JAX's + least``."""
    error = lambda got, want: float(np.linalg.norm(got - want) / np.linalg.norm(want))
    found = {name: (error(kernels[name], x), error(plain[name], x)) for name, x in exact.items()}
    wrong = {
        name: f"{ours:.1e}, plain JAX {theirs:.1e}"
        for name, (ours, theirs) in found.items()
        if not ours <= 1.2 * theirs + least
    }
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong}"
    assert np.median([theirs for _, theirs in found.values()]) < 0.2  # else nothing is said
