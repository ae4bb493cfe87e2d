"""Gradients of a whole RWKV-6 with strong decays under a mean loss over many tokens, by implementation and
dtype, and how far they are from those in float64.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import small_models as small

from fla_jax.models import stack_layers
from fla_jax.training import cross_entropy

STRONGEST = 8.0  # log decays go down to minus so much


def parameters(model: Any, seed: int = 0) -> Any:
    """Random ones, of stacked layers. Log decays are drawn down to a limit of the head's own, -0.5 to -8:
    kernels choose how they go about decays by the strongest of a head.
    """
    rng = np.random.default_rng(seed)
    params = dict(small.params(model, seed))
    for name, block in params.items():
        if name.startswith("blocks_"):
            att = block["att"]
            heads, channels = att["time_faaaa"].shape
            limits = np.log(rng.uniform(0.5, STRONGEST, (heads, 1)))
            decay = np.maximum(limits - rng.exponential(2, (heads, channels)), -6)
            att["time_decay"] = jnp.asarray(decay.reshape(-1), jnp.float32)
            att["time_decay_w2"] *= 0.05
    return stack_layers(params)


def gradients(version_options: dict[str, Any], params: Any, tokens: Any, mean_over: int) -> Any:
    """By parameter, of the sum of the losses of ``tokens`` [B, T + 1] divided by ``mean_over``."""
    model = small.model(6, scan_layers=True, **version_options)
    count = tokens[:, 1:].size

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1])[0]
        return cross_entropy(logits, tokens[:, 1:]) * (count / mean_over)

    made = jax.device_get(jax.jit(jax.grad(loss))(params))
    flat = jax.tree_util.tree_leaves_with_path(made)
    return {jax.tree_util.keystr(path): np.asarray(g, np.float64) for path, g in flat}


def exact(options: dict[str, Any], params: Any, tokens: Any, mean_over: int) -> Any:
    """`gradients` in float64, by plain JAX."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), params)
        double = dict(dtype=jnp.float64, param_dtype=jnp.float64, implementation="xla")
        return gradients(options | double, wide, tokens, mean_over)


def errors(got: Any, want: Any) -> dict[str, float]:
    """Of every parameter, relative to its own norm."""
    return {name: float(np.linalg.norm(got[name] - x) / np.linalg.norm(x)) for name, x in want.items()}
