"""The programs that compute a decoded token: the model itself, and the fast path that equals it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..layers.state import RWKVState
from ..models import RWKV7ForCausalLM
from ..ops import decode


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
        self, weights: Any, tokens: jax.Array, state: RWKVState, active: jax.Array
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
        self, weights: Any, tokens: jax.Array, state: RWKVState, active: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See `fla_jax.generation.loop.Step`; ``weights`` are what `prepare_decode_weights` made."""
        pieces, rows = decode.STEPS.named(self.implementation).load(), active.astype(jnp.int32)
        x = jnp.take(weights.table, tokens, axis=0)  # as the model: NaN for what is no token
        layer = self._layer7 if isinstance(self.model, RWKV7ForCausalLM) else self._layer6
        first = before = None
        for i, p in enumerate(weights.layers):
            x, state, before, made = layer(pieces, p, x, state, before, i, rows, first)
            first = made if first is None else first
        logits, _ = pieces.project(weights.head, x, norm=weights.norm)
        # apart from the kernels that made them: XLA's fusion of slices with calls makes a cycle of them
        shifts, before = jax.lax.optimization_barrier((state.ffn_shift, before))
        return logits, state.replace(ffn_shift=shifts.at[-1].set(before))

    def _layer7(
        self, pieces: Any, p: Any, x: Any, state: Any, before: Any, i: int, active: Any, first: Any
    ) -> Any:
        at = {"layer": i, "active": active}
        made, shift = pieces.project(p.into, x, norm=p.norm, mixes=p.mixes, last=state.att_shift, **at)
        first, scale = made if first is None else first, self.model.config.rate_scale
        y, state = pieces.rwkv7_step(p, made, first, state, (shift, before), i, active, scale, x.dtype)
        x, _ = pieces.project(p.output, y, add=x, dtype=x.dtype)
        hidden, ffn_shift = pieces.project(
            p.key, x, norm=p.ffn_norm, mixes=p.ffn_mixes, last=state.ffn_shift, dtype=x.dtype, **at
        )
        x, _ = pieces.project(p.value, hidden, add=x, dtype=x.dtype)
        return x, state, ffn_shift, made

    def _layer6(
        self, pieces: Any, p: Any, x: Any, state: Any, before: Any, i: int, active: Any, first: Any
    ) -> Any:
        at = {"layer": i, "active": active}
        z, shift = pieces.project(p.first, x, norm=p.norm, mixes=p.mix_x, last=state.att_shift, **at)
        mixed = pieces.rwkv6_mix(p, shift, state.att_shift, i, z, x.dtype)
        made, _ = pieces.project(p.into, mixed)
        y, state = pieces.rwkv6_step(p, made, state, (shift, before), i, active, x.dtype)
        x, _ = pieces.project(p.output, y, add=x, dtype=x.dtype)
        hidden, ffn_shift = pieces.project(
            p.key, x, norm=p.ffn_norm, mixes=p.ffn_mixes, last=state.ffn_shift, dtype=x.dtype, **at
        )
        gate_at = hidden.shape[1] - x.shape[1]
        x, _ = pieces.project(p.value, hidden, gate=hidden, gate_at=gate_at, add=x, dtype=x.dtype)
        return x, state, ffn_shift, made


def of_rows(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[B] as something that goes with a leaf [L, B, ...] of a state."""
    return rows.reshape(1, -1, *(1,) * (x.ndim - 2))
