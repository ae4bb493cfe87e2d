"""Names that the ops give to their outputs and residuals, for `jax.checkpoint` policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

OUT, FINAL, STATES = "fla_jax_out", "fla_jax_final_state", "fla_jax_states"
DENSE, GATHERED = "fla_jax_dense", "fla_jax_gathered"
CHECKPOINT_NAMES = (OUT, FINAL, STATES)
T = TypeVar("T")  # a pytree


def remat_policy(dense: bool = False) -> Callable[..., bool]:
    """Policy for `jax.checkpoint` and `flax.linen.remat` that saves the recurrences' outputs and residuals.

    The backward of a rematerialised block then runs no recurrence forward again. Combine it with others
    through `jax.checkpoint_policies.save_from_both_policies`.

    Args:
        dense: save the outputs of the layers' dense projections as well (8 to 9 C numbers a token and
            layer), so that only elementwise work runs twice.

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
    """Tags the result of a layer's matrix product."""
    return checkpoint_name(x, DENSE)


def name_arrays(tree: T, name: str | None) -> T:
    """``tree`` with all its arrays tagged ``name``; unchanged where that is None."""
    return tree if name is None else jax.tree.map(lambda x: checkpoint_name(x, name), tree)
