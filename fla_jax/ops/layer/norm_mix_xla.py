"""Norm, token shift and mixes in plain JAX: the definition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ...core.types import Mix, Mixed, MixInputs


def shift(h: jax.Array, last: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array:
    """The token before each one of h [B, T, C]: before a sequence's first token ``last`` [B, C] (zeros
    if None), before the first one of a later segment zeros.
    """
    first = jnp.zeros_like(h[:, :1]) if last is None else last[:, None].astype(h.dtype)
    before = jnp.concatenate([first, h[:, :-1]], 1)
    if segment_ids is None:
        return before
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(begins[..., None], 0, before)


def summed(x: jax.Array, y: jax.Array | None, wide: jnp.dtype) -> jax.Array:
    """``x + y`` in ``wide``, rounded as the result x is."""
    h = x.astype(wide)
    return h if y is None else _rounded(h + y.astype(wide), x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(h: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``h`` with the values that it has in ``dtype``. Its derivative rounds nothing."""
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(h, info.nexp, info.nmant)  # XLA would drop a cast there and back
    step = info.smallest_subnormal
    if step < jnp.finfo(h.dtype).tiny:
        return rounded
    # float16's numbers below 6e-5, for which reduce_precision gives 0, are multiples of the smallest one
    return jnp.where(jnp.abs(h) < info.tiny, jnp.round(h / step) * step, rounded)


@_rounded.defjvp
def _rounded_jvp(
    dtype: jnp.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals, dtype), tangents[0]


def norm(h: jax.Array, scale: jax.Array | None, bias: jax.Array | None, eps: float) -> jax.Array:
    """The layer norm of h [..., C]; h without ``scale``."""
    if scale is None or bias is None:
        return h
    h = h - jnp.mean(h, -1, keepdims=True)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
    return h * scale.astype(h.dtype) + bias.astype(h.dtype)


def definition(settings: Mix, x: MixInputs) -> Mixed:
    """The results; one rounding each, to the dtype of ``x.x``."""
    dtype, wide = x.x.dtype, jnp.dtype(settings.compute_name)
    h = summed(x.x, x.y, wide)
    total = h.astype(dtype)
    h = norm(h, x.scale, x.bias, settings.eps)
    difference = shift(h, x.last, x.segment_ids) - h
    mixed = []
    for n, mu in enumerate(x.mixes):
        by = mu.astype(wide) if x.mix_delta is None else mu.astype(wide) + x.mix_delta[n].astype(wide)
        mixed.append((h + difference * by).astype(dtype))
    carried = None if x.y is None and x.scale is None else total
    normalised = h.astype(dtype) if settings.normalised else None
    return Mixed(tuple(mixed), h[:, -1].astype(dtype), carried, normalised)
