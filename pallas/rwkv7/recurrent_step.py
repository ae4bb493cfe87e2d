"""RWKV-7, one token, in Pallas: the state is read once and written once, in its own memory where the caller
donates it.

Plain JAX reads it twice, for a^T S and for the new state, which takes 1.9 times as long as a copy of it,
measured on an H200 (RWKV-6, which needs no such sum first: 1.3 times, as this kernel).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...core.types import Outputs, RWKV7Inputs
from ..backend.pallas import pallas_call
from ..common.recurrent_scan import fma


def has_step_kernel(K: int, V: int) -> bool:
    """Whether the kernel has tiles for states [K, V]: powers of two from 16 on."""
    return all(n >= 16 and n & (n - 1) == 0 for n in (K, V))


def rwkv7_step(
    r_: jax.Ref,
    w_: jax.Ref,
    k_: jax.Ref,
    a_: jax.Ref,
    b_: jax.Ref,
    v_: jax.Ref,
    state_: jax.Ref,
    o_: jax.Ref,
    new_: jax.Ref,
    *,
    block: int,
    scale: float,
) -> None:
    """Grid (blocks of V, heads, batch elements). r, w, k, a, b are [B, H, K], v and o [B, H, V], states
    [B, H, K, V].
    """
    vs, at = pl.ds(pl.program_id(0) * block, block), (pl.program_id(2), pl.program_id(1))
    r, w, k, a, b = (x_[at].astype(jnp.float32)[:, None] for x_ in (r_, w_, k_, a_, b_))
    S = state_[(*at, slice(None), vs)]
    sa = jnp.sum(S * a, 0)[None]
    S = fma(S, jnp.exp(w), fma(b, sa, k * v_[(*at, vs)].astype(jnp.float32)[None]))
    new_[(*at, slice(None), vs)] = S
    o_[(*at, vs)] = (jnp.sum(S * r, 0) * scale).astype(o_.dtype)


def step(scale: float, x: RWKV7Inputs) -> Outputs:
    """One token of every sequence."""
    (B, H, K), V, state = x.r[:, 0].shape, x.v.shape[-1], x.initial_state
    block = min(V, max(16, 4096 // K))
    out = (jax.ShapeDtypeStruct((B, H, V), x.v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32))
    kernel = functools.partial(rwkv7_step, block=block, scale=scale)
    inputs = (*(array[:, 0] for array in (x.r, x.w, x.k, x.a, x.b, x.v)), state)
    o, new = pallas_call(kernel, *inputs, out=out, grid=(V // block, H, B), num_warps=4, aliases={6: 1})
    return Outputs(o[:, None], new)
