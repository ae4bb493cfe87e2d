"""Context parallelism of the plain recurrences: rules for sequences that devices split."""

from __future__ import annotations

import dataclasses
from typing import Generic

import jax
import jax.numpy as jnp

from ..core.context import Context
from ..core.context_parallel import shard_of
from ..core.implementation import Axes, Residuals, Rule
from ..core.mesh import vary_alike
from ..core.types import Outputs, Recurrence, RecurrenceConfig


@dataclasses.dataclass(frozen=True)
class ContextParallelRule(Generic[Recurrence]):
    """A rule for whole sequences that follows ``ctx.cp``.

    A device's tokens take the state S to ``M S + N``. It finds M and N by running the recurrence on values
    [v, 0] from the state [0, I], which gives [N, M]. The residuals are M and the h0 of this device.

    Attributes:
        rule: for whole sequences.
    """

    rule: Rule[Recurrence, Outputs, RecurrenceConfig]

    def residual_axes(self, ctx: Context[Recurrence, RecurrenceConfig]) -> Axes:
        """See `Rule`."""
        if ctx.cp.size == 1:
            return self.rule.residual_axes(ctx)
        return {"h0": "b split h k v", "M": "b split h k j"}

    def fwd(self, ctx: Context[Recurrence, RecurrenceConfig], x: Recurrence) -> tuple[Outputs, Residuals]:
        """See `Rule`."""
        shard = shard_of(ctx.cp, x.segment_ids)
        if shard is None:
            outputs, residuals = self.rule.fwd(ctx, x)
            is_split = ctx.save_residuals and ctx.cp.size > 1
            return outputs, self._unused(ctx, x) if is_split else residuals
        M, N = self._transition(ctx, x)
        h0, ht = shard.enter(M, N, x.initial_state)
        outputs, _ = self.rule.fwd(ctx, x._replace(initial_state=h0))
        residuals = {"h0": h0[:, None], "M": M[:, None]} if ctx.save_residuals else {}
        return outputs._replace(final_state=ht), residuals

    def bwd(
        self, ctx: Context[Recurrence, RecurrenceConfig], x: Recurrence, residuals: Residuals, dy: Outputs
    ) -> Recurrence:
        """See `Rule`."""
        if ctx.cp.size == 1:
            return self.rule.bwd(ctx, x, residuals, dy)
        shard = shard_of(ctx.cp, x.segment_ids)
        if shard is not None:
            x = x._replace(initial_state=residuals["h0"][:, 0])
        _, saved = self.rule.fwd(ctx, x)
        if shard is None:
            return self.rule.bwd(ctx, x, saved, dy)
        no_dht = vary_alike(jnp.zeros_like(dy.final_state), x)
        D = self.rule.bwd(ctx, x, saved, dy._replace(final_state=no_dht)).initial_state
        dht = shard.enter_backward(jnp.swapaxes(residuals["M"][:, 0], -1, -2), D, dy.final_state)
        dx = self.rule.bwd(ctx, x, saved, dy._replace(final_state=dht))
        return dx._replace(initial_state=jnp.where(shard.is_first, dx.initial_state, 0))

    def _transition(
        self, ctx: Context[Recurrence, RecurrenceConfig], x: Recurrence
    ) -> tuple[jax.Array, jax.Array]:
        """(M, N) of the tokens here, [B, H, K, K] and [B, H, K, V]."""
        h0: jax.Array = x.initial_state
        V = x.v.shape[-1]
        eye = jnp.broadcast_to(jnp.eye(h0.shape[2], dtype=h0.dtype), (*h0.shape[:2], *(h0.shape[2],) * 2))
        start = vary_alike(jnp.concatenate([jnp.zeros_like(h0), eye], -1), x)
        v = jnp.concatenate([x.v, jnp.zeros_like(x.k, x.v.dtype)], -1)
        both = self.rule.fwd(ctx, x._replace(v=v, initial_state=start))[0].final_state
        return both[..., V:], both[..., :V]

    def _unused(self, ctx: Context[Recurrence, RecurrenceConfig], x: Recurrence) -> Residuals:
        """Residuals where one device has whole sequences after all: only their shapes matter."""
        B, H, K, V = x.initial_state.shape
        zeros = x.initial_state[0, 0, 0, 0] * 0
        of_size = lambda n: jnp.broadcast_to(zeros, (B, ctx.cp.size, H, K, n))
        return {"h0": of_size(V), "M": of_size(K)}
