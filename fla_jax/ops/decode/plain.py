"""The steps of a decoded token in plain JAX: the definition of what the kernels compute.

Arithmetic is float32, but for the operands of products, which have the weights' dtype. Where
``active`` [B] int32 is 0 the state does not change, and outputs are undefined.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.decode_layers import (
    DECAY_SCALE,
    GROUP_EPS,
    KEY_EPS,
    Layer6,
    Layer7,
    Matrix,
    Norm,
    Shifts,
    States,
    activate,
    layer_norm,
)

State = TypeVar("State", bound=States)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def mix(
    x: jax.Array, last: jax.Array, layer: int, norm: Norm, mixes: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Norm, token shift and mixes: ``(planes [M, B, C] float32, shift [B, C])``."""
    h, before = layer_norm(x, norm), _float32(last[layer])
    shift = jnp.where(active[:, None] != 0, h, before).astype(last.dtype)
    return h + (before - h) * _float32(mixes)[:, None], shift


def project(
    matrix: Matrix,
    x: jax.Array,
    *,
    norm: Norm | None = None,
    mixes: jax.Array | None = None,
    last: jax.Array | None = None,
    layer: int = 0,
    active: jax.Array | None = None,
    add: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_at: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array | None]:
    """Products of one input stage: norm, token shift, mixes, all matrices that read them, what follows.

    Args:
        matrix: [N, K]; `Matrix` says which plane its rows read and what is done with the sums.
        x: [B, K], or planes [M, B, K]; more channels than K are not read.
        norm: scale and bias [K] of the layer norm of x first, or None.
        mixes: [M, K], with ``last``, ``active`` and ``norm``: x is moved towards the token before.
        last: [L, B, K], normalised tokens before, of all layers.
        layer: which of them.
        active: [B] int32.
        add: [B, N], added at the end.
        gate: [B, more than N], its channels from ``gate_at`` on are multiplied with before that.
        gate_at: first channel.
        dtype: of the result.

    Returns:
        ``(y [B, N], shift)``: shift [B, K] is what ``last`` is for the next token, None without mixes.
    """
    shift, (N, K) = None, matrix.shape
    x = x[..., :K]
    if norm is not None and mixes is not None:
        assert last is not None and active is not None
        x, shift = mix(x, last, layer, norm, mixes, active)
    elif norm is not None:
        x = layer_norm(x, norm)
    operand = x.dtype if matrix.scale is not None else matrix.weight.dtype
    weight, x = matrix.dense(operand), x.astype(operand)
    parts, at = [], 0
    for rows, plane, kind in matrix.segments:
        by = x[plane] if x.ndim == 3 else x
        sums = jnp.einsum("bk,nk->bn", by, weight[at : at + rows], preferred_element_type=jnp.float32)
        parts.append(activate(sums, kind))
        at += rows
    y = jnp.concatenate(parts, 1)
    if gate is not None:
        y = y * _float32(gate[:, gate_at : gate_at + N])
    if add is not None:
        y = y + _float32(add)
    return y.astype(dtype), shift


def _group_norm(o: jax.Array, norm: Norm) -> jax.Array:
    """The group norm of o [B, H, N], as [B, C]."""
    o = o - jnp.mean(o, -1, keepdims=True)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + GROUP_EPS)
    return o.reshape(o.shape[0], -1) * _float32(norm[0]) + _float32(norm[1])


def _written(wkv: jax.Array, state: State, shifts: Shifts, layer: int, active: jax.Array) -> State:
    """``state`` with the new states of one layer, where active, and with new token shifts."""
    wkv = jnp.where(active[:, None, None, None] != 0, wkv.astype(state.wkv.dtype), state.wkv[layer])
    shift, before = shifts
    ffn = state.ffn_shift
    return state.replace(
        wkv=state.wkv.at[layer].set(wkv),
        att_shift=state.att_shift.at[layer].set(shift),
        ffn_shift=ffn if before is None else ffn.at[layer - 1].set(before),
    )


def rwkv7_step(
    p: Layer7,
    projections: jax.Array,
    first_projections: jax.Array,
    state: State,
    shifts: Shifts,
    layer: int,
    active: jax.Array,
    rate_scale: float,
    dtype: DTypeLike,
) -> tuple[jax.Array, State]:
    """RWKV-7's second low-rank stage, gates, keys, step and readout.

    Args:
        p: the layer.
        projections: [B, 3 C and the ranks] float32, the product of ``p.into``.
        first_projections: the same of layer 0.
        state: an `RWKVState` of all layers, ``wkv`` [L, B, H, N, N] in any floating-point dtype.
        shifts: new token shifts [B, C] of this layer's attention and of the feed-forward of the layer below
            (None for layer 0), which replace those in ``state``.
        layer: which of them.
        active: [B] int32.
        rate_scale: see `fla_jax.layers.RWKV7Attention`.
        dtype: of y.

    Returns:
        ``(y [B, C], state)``: y is what the output projection reads.
    """
    C, (H, N) = p.second.shape[1], state.wkv.shape[2:4]
    heads = lambda x: x.reshape(-1, H, N)
    r, k, v = (projections[:, i * C : (i + 1) * C] for i in range(3))
    second = jnp.einsum(
        "bpr,pcr->pbc", p.low_rank_inputs(projections), p.second, preferred_element_type=jnp.float32
    )
    decay, rate, share, gate = second
    decay = jnp.exp(DECAY_SCALE * jax.nn.sigmoid(_float32(p.w0) + decay))
    rate = jax.nn.sigmoid(_float32(p.a0) + rate)
    if layer:
        v = v + (first_projections[:, 2 * C : 3 * C] - v) * jax.nn.sigmoid(_float32(p.v0) + share)
    kk = heads(k * _float32(p.k_k))
    square = jnp.sum(kk * kk, -1, keepdims=True)
    kk = kk * jnp.where(square > KEY_EPS**2, jax.lax.rsqrt(jnp.maximum(square, 1e-38)), 1 / KEY_EPS)
    k = k * (1 + (rate - 1) * _float32(p.k_a))
    r, k, v, decay = heads(r), heads(k), heads(v), heads(decay)
    S = _float32(state.wkv[layer])
    read = jnp.einsum("bhk,bhkv->bhv", kk, S)
    S = S * decay[..., None] + k[..., None] * v[..., None, :]
    S = S - (kk * heads(rate) * rate_scale)[..., None] * read[..., None, :]
    o = _group_norm(jnp.einsum("bhk,bhkv->bhv", r, S), p.group_norm)
    bonus = jnp.sum(r * k * _float32(p.r_k).reshape(H, N), -1, keepdims=True) * v
    return ((o + bonus.reshape(o.shape)) * gate).astype(dtype), _written(S, state, shifts, layer, active)


def rwkv6_mix(
    p: Layer6, x: jax.Array, last: jax.Array, layer: int, z: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """RWKV-6's mixed tokens [5, B, C], from the normalised token x [B, C] and z [B, 5 R and more]."""
    _, R, _ = p.mix_delta.shape
    z = z[:, : 5 * R].reshape(-1, 5, R).astype(p.mix_delta.dtype)
    by = jnp.einsum("bpr,prc->pbc", z, p.mix_delta, preferred_element_type=jnp.float32)
    x, before = _float32(x), _float32(last[layer])
    return (x + (before - x) * (_float32(p.mixes)[:, None] + by)).astype(dtype)


def rwkv6_step(
    p: Layer6,
    projections: jax.Array,
    state: State,
    shifts: Shifts,
    layer: int,
    active: jax.Array,
    dtype: DTypeLike,
) -> tuple[jax.Array, State]:
    """RWKV-6's decay, step and readout; ``projections`` [B, 4 C + D] is the product of ``p.into``. Else as
    `rwkv7_step`."""
    (C, _), (H, N) = p.second.shape, state.wkv.shape[2:4]
    heads = lambda x: x.reshape(-1, H, N)
    r, k, v, gate = (projections[:, i * C : (i + 1) * C] for i in range(4))
    low = projections[:, 4 * C :].astype(p.second.dtype)
    decay = jnp.einsum("br,cr->bc", low, p.second, preferred_element_type=jnp.float32) + _float32(p.base)
    decay = heads(jnp.exp(-jnp.exp(jnp.minimum(decay, 20))))
    r, k, v = heads(r), heads(k), heads(v)
    S = _float32(state.wkv[layer])
    o = jnp.einsum("bhk,bhkv->bhv", r, S)
    o = o + jnp.sum(r * k * _float32(p.bonus).reshape(H, N), -1, keepdims=True) * v
    S = S * decay[..., None] + k[..., None] * v[..., None, :]
    return (_group_norm(o, p.group_norm) * jax.nn.silu(gate)).astype(dtype), _written(
        S, state, shifts, layer, active
    )
