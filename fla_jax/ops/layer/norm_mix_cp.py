"""Context parallelism of norm, token shift and mixes: a rule for sequences that devices split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.context_parallel import SequenceShard, from_left, from_right, shard_of
from ...core.implementation import Axes, Residuals, Rule
from ...core.types import Mix, Mixed, MixInputs
from .norm_mix_xla import norm, summed


@dataclasses.dataclass(frozen=True)
class ContextParallelRule:
    """A rule for whole sequences that follows ``ctx.cp``.

    The first token of a device sees the last one of its left neighbour, which crosses before the norm, in its
    own dtype: nothing is rounded that would not be in a whole sequence.

    Attributes:
        rule: for whole sequences.
    """

    rule: Rule[MixInputs, Mixed, Mix]

    def residual_axes(self, ctx: Context[MixInputs, Mix]) -> Axes:
        """See `Rule`."""
        return self.rule.residual_axes(ctx)

    def fwd(self, ctx: Context[MixInputs, Mix], x: MixInputs) -> tuple[Mixed, Residuals]:
        """See `Rule`."""
        shard = shard_of(ctx.cp, x.segment_ids)
        if shard is None:
            return self.rule.fwd(ctx, x)
        previous, _ = _previous_tokens(ctx.settings, shard, x)
        outputs, residuals = self.rule.fwd(ctx, x._replace(last=previous))
        last = jnp.where(shard.is_last, outputs.last, 0)
        return outputs._replace(last=jax.lax.psum(last, shard.axis)), residuals

    def bwd(self, ctx: Context[MixInputs, Mix], x: MixInputs, residuals: Residuals, dy: Mixed) -> MixInputs:
        """See `Rule`."""
        shard = shard_of(ctx.cp, x.segment_ids)
        if shard is None:
            return self.rule.bwd(ctx, x, residuals, dy)
        previous, pull = _previous_tokens(ctx.settings, shard, x)
        last = jnp.where(shard.is_last, dy.last, 0)
        dx = self.rule.bwd(ctx, x._replace(last=previous), residuals, dy._replace(last=last))
        dlast = dx.last
        assert dlast is not None  # a last was given
        crossed = shard.continued(jnp.where(shard.is_first, 0, dlast))
        dtoken, *norm_gradients = pull(crossed.astype(previous.dtype))
        dtoken = from_right(dtoken, shard.axis)

        def with_token(gradient: jax.Array) -> jax.Array:
            return gradient.at[:, -1].add(dtoken.astype(gradient.dtype))

        def add(gradient: jax.Array | None, more: jax.Array) -> jax.Array | None:
            return None if gradient is None else gradient + (more if gradient.ndim > 1 else jnp.sum(more, 0))

        scale, bias = (add(g, more) for g, more in zip((dx.scale, dx.bias), norm_gradients))
        return dx._replace(
            x=with_token(dx.x),
            y=None if dx.y is None else with_token(dx.y),
            scale=scale,
            bias=bias,
            last=None if x.last is None else jnp.where(shard.is_first, dlast, 0).astype(x.last.dtype),
        )


def _previous_tokens(
    settings: Mix, shard: SequenceShard, x: MixInputs
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """The previous token of each sequence's first token here [B, C], unrounded; and the pullback to the
    neighbour's last token, and to scale and bias by batch element.
    """
    compute = jnp.dtype(settings.compute_name)
    last = summed(x.x[:, -1], None if x.y is None else x.y[:, -1], compute).astype(x.x.dtype)
    token = from_left(last, shard.axis)
    scale, bias = (None if p is None else jnp.broadcast_to(p, token.shape) for p in (x.scale, x.bias))

    def normalise(token: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
        return norm(token, scale, bias, settings.eps)

    h, pull = jax.vjp(normalise, token.astype(compute), scale, bias)
    first = jnp.zeros_like(h) if x.last is None else x.last.astype(compute)
    return jnp.where(shard.is_first, first, shard.continued(h)), pull
