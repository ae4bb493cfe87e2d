"""Which program computes a decoded token: the model itself, or the fast path that equals it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..layers.state import RWKVState


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """The definition of a decoded token: a call of the model with one token.

    Attributes:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
    """

    model: Any

    def __call__(
        self, weights: Any, tokens: jax.Array, state: RWKVState, alive: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See `fla_jax.generation.loop.Step`; ``weights`` are the model's parameters."""
        logits, new = self.model.apply({"params": weights}, tokens[:, None], state)

        def kept(x: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(of_rows(alive, x), x.astype(old.dtype), old)

        return logits[:, -1], jax.tree.map(kept, new, state)


def of_rows(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[B] as something that goes with a leaf [L, B, ...] of a state."""
    return rows.reshape(1, -1, *(1,) * (x.ndim - 2))
