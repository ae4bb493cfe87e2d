"""Models with random parameters for the benchmarks of decoding."""

from __future__ import annotations

import dataclasses
from typing import Any


def make(version: int, size: str, vocab: int, dtype: str, scan: bool | str = False) -> tuple[Any, Any]:
    """A model and random parameters: activations near 1, logits as spread as a language model's."""
    import jax
    import jax.numpy as jnp

    from fla_jax import models

    layers, width = map(int, size.split("x"))
    config = getattr(models, f"RWKV{version}Config")
    kind = getattr(models, f"RWKV{version}ForCausalLM")
    head = 64 if width >= 128 else 16
    wanted = config(vocab, width, layers, head_dim=head, dtype=dtype, param_dtype=dtype, scan_layers=scan)
    # all layers of a matrix are drawn at once: one draw for each layer compiles for minutes
    model = kind(dataclasses.replace(wanted, scan_layers=True))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def draw(i: int, path: Any, x: Any) -> jax.Array:
        name = path[-1].key
        matrix = x.ndim - (path[0].key == "blocks") > 1 and name not in ("r_k", "time_faaaa")
        values = jax.random.normal(jax.random.key(i), x.shape, jnp.float32)
        values = values * (x.shape[-2] ** -0.5 * (3 if path[0].key == "head" else 1) if matrix else 0.3)
        middle = {"scale": 1.0, "w0": -1.0, "time_decay": -1.0, "k_k": 1.0, "k_a": 1.0}.get(name, 0.5)
        return (values + (0 if matrix or name == "bias" else middle)).astype(x.dtype)

    make_all = jax.jit(lambda: [draw(i, path, x) for i, (path, x) in enumerate(leaves)])
    stacked = jax.tree.unflatten(tree, make_all())
    return kind(wanted), stacked if scan else jax.jit(models.unstack_layers)(stacked)
