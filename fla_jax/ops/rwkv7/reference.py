"""RWKV-7 token by token: the definition of the op, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.types import RecurrenceConfig, RWKV7Inputs
from ..intra_exact import dot
from ..scan import ScanRule, Step, StepBack, Tokens


def _step(S: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """S [B, H, K, V]; r, w, k, a, b [B, H, K], v [B, H, V]."""
    r, w, k, v, a, b, restart = token
    S = jnp.where(restart[..., None], 0, S)
    sa = dot("bhk,bhkv->bhv", a, S)
    S = jnp.exp(w)[..., None] * S + b[..., None] * sa[..., None, :] + k[..., None] * v[..., None, :]
    return S, dot("bhk,bhkv->bhv", r, S)


def _back(dS: jax.Array, x: tuple[jax.Array, Tokens, jax.Array]) -> tuple[jax.Array, Tokens]:
    S, (r, w, k, v, a, b, restart), do = x
    S = jnp.where(restart[..., None], 0, S)
    decay = jnp.exp(w)
    sa = dot("bhk,bhkv->bhv", a, S)
    after = decay[..., None] * S + b[..., None] * sa[..., None, :] + k[..., None] * v[..., None, :]
    dS = dS + r[..., None] * do[..., None, :]
    dsa = dot("bhkv,bhk->bhv", dS, b)
    grads = (
        dot("bhkv,bhv->bhk", after, do),
        decay * jnp.sum(S * dS, -1),
        dot("bhkv,bhv->bhk", dS, v),
        dot("bhkv,bhk->bhv", dS, k),
        dot("bhkv,bhv->bhk", S, dsa),
        dot("bhkv,bhv->bhk", dS, sa),
    )
    dS = decay[..., None] * dS + a[..., None] * dsa[..., None, :]
    return jnp.where(restart[..., None], 0, dS), grads


def _steps(x: RWKV7Inputs, cfg: RecurrenceConfig) -> tuple[Step, StepBack]:
    return _step, _back


RULE = ScanRule(RWKV7Inputs, ("r", "w", "k", "v", "a", "b"), _steps)
