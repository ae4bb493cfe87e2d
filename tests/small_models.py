"""Small models with random parameters, made in NumPy: no compile, no luck with zeros that hide a term."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM

VERSIONS = (6, 7)
HEADS = 2


def model(version, **options):
    options = {"vocab_size": 24, "hidden_size": 32, "num_layers": 2, "head_dim": 16, **options}
    ranks = {"proj_low_rank_dim": 4, "decay_low_rank_dim": 8}
    if version == 7:
        ranks = {"decay_low_rank_dim": 4, "a_low_rank_dim": 6, "v_low_rank_dim": 5, "gate_low_rank_dim": 8}
    config, cls = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    return cls(config(**{**ranks, **options}))


def shapes(module, *inputs):
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


# The default seed makes a well-conditioned model: perturbing each weight by 6e-8 (float32's rounding) moves
# no logit by more than 2e-6. With seed 0 of RWKV-6 r * u * k nearly cancels at a first token and the group
# norm blows the rounding errors up, in any implementation.
SEED = 2


def draw(like, seed=SEED):
    """Random parameters: every term counts, activations stay near 1."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = path[-1].key
        scale = 1 / np.sqrt(x.shape[-2]) if x.ndim > 1 and name not in ("r_k", "time_faaaa") else 0.5
        values = rng.normal(size=x.shape) * scale
        mix = 0.5 if name.startswith(("x_", "time_maa_")) else 0.0
        centre = {"scale": 1.0, "w0": -1.0, "time_decay": -1.0, "k_k": 1.0, "k_a": 1.0}.get(name, mix)
        return jnp.asarray(values + (centre if x.ndim == 1 else 0), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, like)


def params(module, seed=SEED):
    return draw(shapes(module, jnp.zeros((1, 2), jnp.int32)), seed)


def tokens(batch, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 24, (batch, length)), jnp.int32)


def random_state(module, batch, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), module.init_state(batch))


def error(got, want):
    """Largest difference, in units of the largest wanted value (at least 1)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    return np.abs(got - want).max() / max(1.0, np.abs(want).max())


def largest_error(got, want):
    """The largest `error` of the leaves of two trees."""
    got, want = jax.device_get((got, want))
    return np.max(jax.tree.leaves(jax.tree.map(error, got, want)))


def assert_close(got, want, tolerance=1e-5):
    assert largest_error(got, want) < tolerance


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@contextlib.contextmanager
def float64():
    """For all threads, where `jax.enable_x64` is for one: XLA partitions ops in threads of its own."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
