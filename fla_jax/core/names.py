"""Names that the ops give to their outputs and kept arrays, for `jax.checkpoint` policies."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

OUT, FINAL, STATES = "fla_jax_out", "fla_jax_final_state", "fla_jax_states"
DENSE = "fla_jax_dense"
CHECKPOINT_NAMES = (OUT, FINAL, STATES)


def remat_policy(dense: bool = False):
    """Policy for `jax.checkpoint` / `flax.linen.remat` that keeps what the recurrences' forward made.

    With it the backward of a rematerialised block runs no recurrence's forward a second time. Combine it with
    others through `jax.checkpoint_policies.save_from_both_policies`.

    Args:
        dense: keep what the layers' dense projections made as well (8 to 9 C numbers a token and layer), so
            that only elementwise work runs twice.

    Example:
        >>> import jax, jax.numpy as jnp, fla_jax
        >>> from fla_jax.ops import chunk_rwkv6
        >>> x, u = jnp.ones((1, 4, 1, 2)), jnp.ones((1, 2))
        >>> loss = lambda x: chunk_rwkv6(x, x, x, -x, u)[0].sum()
        >>> jax.grad(jax.checkpoint(loss, policy=fla_jax.remat_policy()))(x).shape
        (1, 4, 1, 2)
    """
    return jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES, *([DENSE] if dense else []))


def name_dense(x: jax.Array) -> jax.Array:
    """Tags what a layer's matrix product made."""
    return checkpoint_name(x, DENSE)


def name_arrays(tree: Any, name: str | None) -> Any:
    """``tree`` with all its arrays tagged ``name``; as it is where there is no name."""
    return tree if name is None else jax.tree.map(lambda x: checkpoint_name(x, name), tree)
