"""The programs that compute a decoded token: the model itself, and the fast path that equals it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..layers.state import RWKVState
from ..ops import decode
from .decode_families import decode_family


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """The definition of a decoded token: a call of the model with one token.

    Attributes:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
    """

    model: Any
    sampling: ClassVar[str] = "xla"
    per_call: ClassVar[int | None] = None

    def __call__(
        self, weights: PyTree, tokens: jax.Array, state: RWKVState, active: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See `fla_jax.generation.loop.Step`; ``weights`` are the model's parameters."""
        logits, new = self.model.apply({"params": weights}, tokens[:, None], state)

        def kept(x: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(of_rows(active, x), x.astype(old.dtype), old)

        return logits[:, -1], jax.tree.map(kept, new, state)


@dataclasses.dataclass(frozen=True)
class FastStep:
    """The same in a few large pieces (`fla_jax.ops.decode`), with the states of all layers written in place.

    Attributes:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        implementation: of the pieces, ``"triton"`` or ``"plain"``.
    """

    model: Any
    implementation: str

    @property
    def sampling(self) -> str:
        """See `fla_jax.generation.loop.Step`."""
        return "triton" if self.implementation == "triton" else "xla"

    @property
    def per_call(self) -> int | None:
        """See `fla_jax.generation.loop.Step`."""
        return 8 if self.implementation == "triton" else None

    def __call__(
        self, weights: PyTree, tokens: jax.Array, state: RWKVState, active: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See `fla_jax.generation.loop.Step`; ``weights`` are what `prepare_decode_weights` made."""
        pieces, rows = decode.STEPS.named(self.implementation).load(), active.astype(jnp.int32)
        x = jnp.take(weights.table, tokens, axis=0)  # as the model: NaN for what is no token
        family, config = decode_family(self.model), self.model.config
        assert family is not None  # `Decoder` asks `unsupported`
        first = before = None
        for i, p in enumerate(weights.layers):
            x, state, before, made = family.layer(pieces, p, x, state, before, i, rows, first, config)
            first = made if first is None else first
        logits, _ = pieces.project(weights.head, x, norm=weights.norm)
        # apart from the kernels that made them: XLA's fusion of slices with calls makes a cycle of them
        shifts, before = jax.lax.optimization_barrier((state.ffn_shift, before))
        return logits, state.replace(ffn_shift=shifts.at[-1].set(before))


def of_rows(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[B] as something that goes with a leaf [L, B, ...] of a state."""
    return rows.reshape(1, -1, *(1,) * (x.ndim - 2))
