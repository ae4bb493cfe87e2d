"""Gradients of an RWKV-6 with strong decays under a mean loss: kernels' errors beside those of plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
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
Gradients = dict[str, np.ndarray]


def parameters(options: Mapping[str, Any]) -> Any:
    """Random ones, of stacked layers, half of the log decays near a limit of the head's."""
    rng = np.random.default_rng(0)
    params = dict(small.params(small.model(6, **options)))
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


def gradients(options: Mapping[str, Any], params: Any, tokens: jax.Array) -> Gradients:
    """By parameter, of the losses' sum over ``tokens`` [B, T + 1] divided by TOKENS."""
    model, share = small.model(6, scan_layers=True, **options), tokens[:, 1:].size / TOKENS

    def loss(params: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens[:, :-1])[0], tokens[:, 1:]) * share

    made = jax.device_get(jax.jit(jax.grad(loss))(params))
    flat = jax.tree_util.tree_leaves_with_path(made)
    return {jax.tree_util.keystr(path): np.asarray(g, np.float64) for path, g in flat}


def plain_gradients(options: Mapping[str, Any], params: Any, tokens: jax.Array) -> Gradients:
    """`gradients` of plain JAX, the examples one after another, which takes less memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "INTERPRET", True)  # nothing chooses kernels unasked
        plain = {**options, "implementation": "xla"}
        made = [gradients(plain, params, example[None]) for example in tokens]
    return {name: sum(part[name] for part in made) for name in made[0]}


def exact_gradients(options: Mapping[str, Any], params: Any, tokens: jax.Array) -> Gradients:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), params)
        return plain_gradients({**options, "dtype": jnp.float64, "param_dtype": jnp.float64}, wide, tokens)


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
