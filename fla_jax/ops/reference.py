"""Token by token with `jax.lax.scan`: the definition of both ops, forward and backward.

The states that enter every chunk are kept; the backward runs each chunk forward again and then walks it in reverse, so memory is linear in T / chunk.
Nothing is divided by a decay and no two large sums are subtracted, so every gradient is exact at every decay.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .config import OpConfig
from .layout import Chunks, Segments, plan, segments

CHUNK = 64  # tokens between two kept states
_dot = lambda spec, *x: jnp.einsum(spec, *x, precision=jax.lax.Precision.HIGHEST)


def _tokens(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 0)  # [B, H, C, D] -> [C, B, H, D]


def _chunks(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 2)


def _restart(seg: Segments | None, like: jax.Array) -> jax.Array:
    """[n, B, 1, C, 1]: the state is emptied before this token."""
    if seg is None:
        return jnp.zeros((like.shape[0], 1, 1, like.shape[3], 1), bool)
    return jnp.concatenate([~seg.start[..., :1, :], seg.ids[..., 1:, :] != seg.ids[..., :-1, :]], axis=-2)


def _forward(step, chunks: Chunks, s0: jax.Array, xs):
    """Runs ``step(S, token) -> (S, y)`` over all chunks. Returns y in chunks, the states that enter the chunks, the final states."""

    def chunk(carry, x):
        sequence, x = x
        entering = chunks.read(carry, sequence)
        leaving, y = jax.lax.scan(step, entering, jax.tree.map(_tokens, x))
        return chunks.write(carry, leaving, sequence), (_chunks(y), entering)

    final, (y, states) = jax.lax.scan(chunk, s0, (chunks.sequence, xs))
    return y, states, final


def _backward(step, back, chunks: Chunks, ds: jax.Array, states, xs, dy):
    """Walks the chunks in reverse with ``back(dS, (S_before, token, dy)) -> (dS, gradients)``. Returns token gradients in chunks and the final dS."""

    def chunk(carry, x):
        sequence, entering, x, dy = x
        x = jax.tree.map(_tokens, x)
        _, before = jax.lax.scan(lambda S, t: (step(S, t)[0], S), entering, x)
        ds, grads = jax.lax.scan(back, chunks.read(carry, sequence), (before, x, _tokens(dy)), reverse=True)
        return chunks.write(carry, ds, sequence), jax.tree.map(_chunks, grads)

    ds, grads = jax.lax.scan(chunk, ds, (chunks.sequence, states, xs, dy), reverse=True)
    return grads, ds


def _step6(u):
    """S [B, H, K, V]; r, k, w [B, H, K], v [B, H, V]."""

    def step(S, token):
        r, k, v, w, restart = token
        S = jnp.where(restart[..., None], 0, S)
        y = _dot("bhk,bhkv->bhv", r, S) + jnp.sum(r * u * k, -1, keepdims=True) * v
        return jnp.exp(w)[..., None] * S + k[..., None] * v[..., None, :], y

    def back(ds, x):
        S, (r, k, v, w, restart), dy = x
        S = jnp.where(restart[..., None], 0, S)
        p = jnp.sum(dy * v, -1, keepdims=True)
        decay = jnp.exp(w)
        dr = _dot("bhkv,bhv->bhk", S, dy) + p * u * k
        dk = _dot("bhkv,bhv->bhk", ds, v) + p * u * r
        dv = _dot("bhkv,bhk->bhv", ds, k) + jnp.sum(r * u * k, -1, keepdims=True) * dy
        dw = decay * jnp.sum(S * ds, -1)
        ds = decay[..., None] * ds + r[..., None] * dy[..., None, :]
        return jnp.where(restart[..., None], 0, ds), (dr, dk, dv, dw, p * r * k)

    return step, back


def _step7(S, token):
    """S [B, H, K, V]; r, w, k, a, b [B, H, K], v [B, H, V]."""
    r, w, k, v, a, b, restart = token
    S = jnp.where(restart[..., None], 0, S)
    sa = _dot("bhk,bhkv->bhv", a, S)
    S = jnp.exp(w)[..., None] * S + b[..., None] * sa[..., None, :] + k[..., None] * v[..., None, :]
    return S, _dot("bhk,bhkv->bhv", r, S)


def _back7(ds, x):
    S, (r, w, k, v, a, b, restart), dy = x
    S = jnp.where(restart[..., None], 0, S)
    decay = jnp.exp(w)
    sa = _dot("bhk,bhkv->bhv", a, S)
    after = decay[..., None] * S + b[..., None] * sa[..., None, :] + k[..., None] * v[..., None, :]
    ds = ds + r[..., None] * dy[..., None, :]
    dsa = _dot("bhkv,bhk->bhv", ds, b)
    grads = (
        _dot("bhkv,bhv->bhk", after, dy),
        decay * jnp.sum(S * ds, -1),
        _dot("bhkv,bhv->bhk", ds, v),
        _dot("bhkv,bhk->bhv", ds, k),
        _dot("bhkv,bhv->bhk", S, dsa),
        _dot("bhkv,bhv->bhk", ds, sa),
    )
    ds = decay[..., None] * ds + a[..., None] * dsa[..., None, :]
    return jnp.where(restart[..., None], 0, ds), grads


def _prepare(cfg: OpConfig, arrays, segment_ids, cu_seqlens):
    T = arrays[0].shape[1]
    chunks = plan(T, min(cfg.chunk_size or CHUNK, T), cu_seqlens)
    xs = tuple(chunks.split(x, cfg.compute) for x in arrays)
    return chunks, (*xs, _restart(segments(chunks, segment_ids), xs[0]))


def rwkv6_fwd(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    chunks, xs = _prepare(cfg, (r, k, v, w), segment_ids, cu_seqlens)
    step, _ = _step6(u.astype(cfg.compute))
    y, states, final = _forward(step, chunks, s0, xs)
    return (chunks.join(y * cfg.scale, v.dtype), final), states


def rwkv6_bwd(cfg: OpConfig, inputs, states, dy, ds):
    """Backward rule: gradients of the token arrays, u and the initial state."""
    r, k, v, w, u, _, segment_ids, cu_seqlens = inputs
    chunks, xs = _prepare(cfg, (r, k, v, w), segment_ids, cu_seqlens)
    step, back = _step6(u.astype(cfg.compute))
    grads, ds0 = _backward(step, back, chunks, ds, states, xs, chunks.split(dy, cfg.compute) * cfg.scale)
    *grads, du = grads
    return tuple(chunks.join(g, x.dtype) for g, x in zip(grads, (r, k, v, w))) + (jnp.sum(du, (0, 1, 3)).astype(u.dtype), ds0)


def rwkv7_fwd(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    chunks, xs = _prepare(cfg, (r, w, k, v, a, b), segment_ids, cu_seqlens)
    y, states, final = _forward(_step7, chunks, s0, xs)
    return (chunks.join(y * cfg.scale, v.dtype), final), states


def rwkv7_bwd(cfg: OpConfig, inputs, states, dy, ds):
    """Backward rule: gradients of the token arrays and the initial state."""
    *arrays, _, segment_ids, cu_seqlens = inputs
    chunks, xs = _prepare(cfg, arrays, segment_ids, cu_seqlens)
    grads, ds0 = _backward(_step7, _back7, chunks, ds, states, xs, chunks.split(dy, cfg.compute) * cfg.scale)
    return tuple(chunks.join(g, x.dtype) for g, x in zip(grads, arrays)) + (ds0,)
