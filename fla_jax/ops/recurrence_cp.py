"""Recurrences whose rows are split between devices, out of implementations for whole rows: for the plain
forms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..core.context import Context, Outputs, RecurrenceConfig
from ..core.context_parallel import shard_of
from ..core.sharding import vary_alike

Kept = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ContextParallelRule:
    """A module with ``forward`` and ``backward`` (see `fla_jax.core.op`) that follows ``call.sequence``.

    A device finds the map (M, N) of its own tokens by running the recurrence on values [v, 0] from the state
    [0, I]: what comes out is [N, M]. Of the forward only M and the state that enters here are kept.

    Attributes:
        module: the implementation for whole rows.
    """

    module: Any

    def residual_axes(self, ctx: Context[RecurrenceConfig]) -> dict[str, str]:
        """See `fla_jax.core.op`."""
        if ctx.cp_size == 1:
            return self.module.residual_axes(ctx)
        return {"entering": "b stretch h k v", "M": "b stretch h k j"}

    def fwd(self, ctx: Context[RecurrenceConfig], x: Any) -> tuple[Outputs, Kept]:
        """See `fla_jax.core.op`."""
        shard = shard_of(ctx, x.segment_ids)
        if shard is None:
            outputs, kept = self.module.fwd(ctx, x)
            return outputs, kept if ctx.cp_size == 1 else self._nothing(ctx, x)
        M, N = (array[:, None] for array in self._map(ctx, x))
        entering, final = shard.enter(M, N, x.initial_state)
        outputs, _ = self.module.fwd(ctx, x._replace(initial_state=entering))
        return outputs._replace(final_state=final), {"entering": entering[:, None], "M": M}

    def bwd(self, ctx: Context[RecurrenceConfig], x: Any, kept: Kept, cotangents: Outputs) -> Any:
        """See `fla_jax.core.op`."""
        if ctx.cp_size == 1:
            return self.module.bwd(ctx, x, kept, cotangents)
        shard = shard_of(ctx, x.segment_ids)
        if shard is not None:
            x = x._replace(initial_state=kept["entering"][:, 0])
        _, states = self.module.fwd(ctx, x)
        if shard is None:
            return self.module.bwd(ctx, x, states, cotangents)
        nothing = vary_alike(jnp.zeros_like(cotangents.final_state), x)
        alone = cotangents._replace(final_state=nothing)
        D = self.module.bwd(ctx, x, states, alone).initial_state
        leaving = shard.enter_backward(kept["M"], D[:, None], cotangents.final_state)
        gradients = self.module.bwd(ctx, x, states, cotangents._replace(final_state=leaving))
        first = jnp.where(shard.is_first, gradients.initial_state, 0)
        return gradients._replace(initial_state=first)

    def _map(self, ctx: Context[RecurrenceConfig], x: Any) -> tuple[jax.Array, jax.Array]:
        """(M, N) of the tokens here, [B, H, K, K] and [B, H, K, V]."""
        s0, V = x.initial_state, x.v.shape[-1]
        eye = jnp.broadcast_to(jnp.eye(s0.shape[2], dtype=s0.dtype), (*s0.shape[:2], *(s0.shape[2],) * 2))
        start = vary_alike(jnp.concatenate([jnp.zeros_like(s0), eye], -1), x)
        wide = jnp.concatenate([x.v, jnp.zeros_like(x.k, x.v.dtype)], -1)
        both = self.module.fwd(ctx, x._replace(v=wide, initial_state=start))[0].final_state
        return both[..., V:], both[..., :V]

    def _nothing(self, ctx: Context[RecurrenceConfig], x: Any) -> Kept:
        """What is kept where one device has whole rows after all: shapes."""
        B, H, K, V = x.initial_state.shape
        zeros = x.initial_state[0, 0, 0, 0] * 0
        shape = (B, ctx.cp_size, H, K)
        return {"entering": jnp.broadcast_to(zeros, (*shape, V)), "M": jnp.broadcast_to(zeros, (*shape, K))}
