"""Launcher of `contract`, which both ops' backward rules share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.pallas_call import pallas_call
from .recurrent_pairs import BLOCK, contract
from .recurrent_plan import STRETCH, Plan

RATES = 32  # rows of K that a program of the gradients takes, in one warp


def contract_values(plan: Plan, H: int, ys: Sequence[jax.Array], zs: Sequence[jax.Array], states: jax.Array, dstates: jax.Array, scale: float) -> Any:
    """All sums over V that the gradients need, in the order of `contract`'s outputs.

    Args:
        plan: of the call.
        H: heads.
        ys: what each reader's output meets [B * T' * H, V]: do first.
        zs: what each writer writes [B * T' * H, V].
        states: [B * number * H, K, V], entering each stretch.
        dstates: likewise, gradients of those that leave.
        scale: factor of do.
    """
    s, tokens, entries = plan.sizes, ys[0].shape[0], states.shape[0]
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    out = [f32(tokens, s.K)] * (len(ys) + len(zs))
    out += [f32(entries, s.K), f32(entries, len(ys), len(zs), STRETCH, STRETCH), f32(entries, len(zs), STRETCH)]
    kernel = functools.partial(contract, sizes=s, readers=len(ys), writers=len(zs), scale=scale)
    grid = (s.K // min(s.K, BLOCK), H, entries // H)
    return pallas_call(kernel, *ys, *zs, states, dstates, out=out, grid=grid, num_warps=4)
