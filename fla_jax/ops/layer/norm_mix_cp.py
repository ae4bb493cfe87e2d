"""Norm, token shift and mixes of rows that are split between devices, out of implementations for whole
rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core.context import Context, Mix, Mixed, MixInputs
from ...core.context_parallel import SequenceShard, from_left, from_right, shard_of
from .norm_mix_xla import norm, summed

Kept = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ContextParallelRule:
    """A module with ``forward`` and ``backward`` (see `fla_jax.core.op`) that follows ``call.sequence``.

    The first token of a device sees the last one of its left neighbour. What crosses is that token before the
    norm, in its own dtype, so that nothing is rounded which would not be in a whole row.

    Attributes:
        module: the implementation for whole rows.
    """

    module: Any

    def residual_axes(self, ctx: Context[Mix]) -> dict[str, str]:
        """See `fla_jax.core.op`."""
        return self.module.residual_axes(ctx)

    @property
    def unused_cotangents(self) -> tuple[str, ...]:
        """See `fla_jax.core.op`."""
        return getattr(self.module, "unused_cotangents", ())

    def fwd(self, ctx: Context[Mix], x: MixInputs) -> tuple[Mixed, Kept]:
        """See `fla_jax.core.op`."""
        shard = shard_of(ctx, x.segment_ids)
        if shard is None:
            return self.module.fwd(ctx, x)
        entering, _ = _entering(ctx.settings, shard, x)
        outputs, residuals = self.module.fwd(ctx, x._replace(last=entering))
        last = jnp.where(shard.is_last, outputs.last, 0)
        return outputs._replace(last=jax.lax.psum(last, shard.axis)), residuals

    def bwd(self, ctx: Context[Mix], x: MixInputs, residuals: Kept, cotangents: Mixed) -> MixInputs:
        """See `fla_jax.core.op`."""
        shard = shard_of(ctx, x.segment_ids)
        if shard is None:
            return self.module.bwd(ctx, x, residuals, cotangents)
        entering, pull = _entering(ctx.settings, shard, x)
        last = jnp.where(shard.is_last, cotangents.last, 0)
        own = self.module.bwd(ctx, x._replace(last=entering), residuals, cotangents._replace(last=last))
        crossed = shard.continued(jnp.where(shard.is_first, 0, own.last))
        row, *norm_gradients = pull(crossed.astype(entering.dtype))
        row = from_right(row, shard.axis)

        def with_row(gradient: jax.Array) -> jax.Array:
            return gradient.at[:, -1].add(row.astype(gradient.dtype))

        def add(gradient: jax.Array | None, more: jax.Array) -> jax.Array | None:
            return None if gradient is None else gradient + (more if gradient.ndim > 1 else jnp.sum(more, 0))

        scale, bias = (add(g, more) for g, more in zip((own.scale, own.bias), norm_gradients))
        return own._replace(
            x=with_row(own.x),
            y=None if x.y is None else with_row(own.y),
            scale=scale,
            bias=bias,
            last=None if x.last is None else jnp.where(shard.is_first, own.last, 0).astype(x.last.dtype),
        )


def _entering(settings: Mix, shard: SequenceShard, x: MixInputs) -> tuple[jax.Array, Any]:
    """What the first token of every row here sees [B, C], unrounded; and the pullback to the neighbour's last
    token, and to scale and bias by row.
    """
    wide = jnp.dtype(settings.compute_name)
    row = from_left(
        summed(x.x[:, -1], None if x.y is None else x.y[:, -1], wide).astype(x.x.dtype), shard.axis
    )
    B, C = row.shape
    by_row = (
        None if x.scale is None else (jnp.broadcast_to(x.scale, (B, C)), jnp.broadcast_to(x.bias, (B, C)))
    )
    scale, bias = (None, None) if by_row is None else by_row

    def normalise(row: jax.Array, scale: Any, bias: Any) -> jax.Array:
        return norm(row, scale, bias, settings.eps)

    h, pull = jax.vjp(normalise, row.astype(wide), scale, bias)
    first = jnp.zeros_like(h) if x.last is None else x.last.astype(wide)
    return jnp.where(shard.is_first, first, shard.continued(h)), pull
