"""Tokens [B, T, ...] in one block a device, for local sums over tokens."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.mesh import is_explicit, is_manual, mesh_axes, spec_of
from .sharding import TOKEN_AXES, constrain


def token_blocks(x: jax.Array) -> tuple[int, int]:
    """The number of devices that B and T of ``x`` [B, T, ...] are split over; 1 where not evenly."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or is_manual():
        return 1, 1
    split = spec_of(x)[:2] if is_explicit() else nn.logical_to_mesh_axes(TOKEN_AXES) or ()
    batch, tokens = (math.prod(mesh.shape[axis] for axis in mesh_axes(entry)) for entry in split)
    return 1 if x.shape[0] % batch else batch, 1 if x.shape[1] % tokens else tokens


def split_tokens(x: jax.Array, blocks: tuple[int, int]) -> jax.Array:
    """[B, T, ...] -> [P, Q, B / P, T / Q, ...], P and Q split over devices as B and T were."""
    batch, tokens = blocks
    x = x.reshape(batch, -1, *x.shape[1:])
    x = x.reshape(*x.shape[:2], tokens, -1, *x.shape[3:])
    return constrain(jnp.moveaxis(x, 2, 1), *TOKEN_AXES, *(None,) * (x.ndim - 2))


def join_tokens(x: jax.Array) -> jax.Array:
    """The inverse of `split_tokens`."""
    x = constrain(x, *TOKEN_AXES, *(None,) * (x.ndim - 2))
    x = jnp.moveaxis(x, 1, 2)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    return constrain(x.reshape(-1, *x.shape[2:]), *TOKEN_AXES, *(None,) * (x.ndim - 3))
