"""RWKV-6 token by token: the definition of the op, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.types import RecurrenceConfig, RWKV6Inputs
from ..intra_exact import dot
from ..scan import ScanRule, Step, StepBack, Tokens


def _steps(x: RWKV6Inputs, cfg: RecurrenceConfig) -> tuple[Step, StepBack]:
    """S [B, H, K, V]; r, k, w [B, H, K], v [B, H, V]."""
    u = x.u.astype(cfg.compute)

    def step(S: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        r, k, v, w, restart = token
        S = jnp.where(restart[..., None], 0, S)
        o = dot("bhk,bhkv->bhv", r, S) + jnp.sum(r * u * k, -1, keepdims=True) * v
        return jnp.exp(w)[..., None] * S + k[..., None] * v[..., None, :], o

    def back(dS: jax.Array, x: tuple[jax.Array, Tokens, jax.Array]) -> tuple[jax.Array, Tokens]:
        S, (r, k, v, w, restart), do = x
        S = jnp.where(restart[..., None], 0, S)
        p = jnp.sum(do * v, -1, keepdims=True)
        decay = jnp.exp(w)
        dr = dot("bhkv,bhv->bhk", S, do) + p * u * k
        dk = dot("bhkv,bhv->bhk", dS, v) + p * u * r
        dv = dot("bhkv,bhk->bhv", dS, k) + jnp.sum(r * u * k, -1, keepdims=True) * do
        dw = decay * jnp.sum(S * dS, -1)
        dS = decay[..., None] * dS + r[..., None] * do[..., None, :]
        return jnp.where(restart[..., None], 0, dS), (dr, dk, dv, dw, p * r * k)

    return step, back


RULE = ScanRule(RWKV6Inputs, ("r", "k", "v", "w"), _steps)
