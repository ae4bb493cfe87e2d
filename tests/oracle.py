"""The recurrences in NumPy, float64, one token at a time, with gradients by reverse accumulation through
stored states: independent of the code under test.

Inputs are cast to float64 exactly, so a comparison measures the error of the op and not of its inputs'
rounding.
"""

from __future__ import annotations

import itertools

import numpy as np


def _rows(B, T, N, segment_ids, cu_seqlens):
    """(batch row, state row, first token, last token + 1, state entering is the initial one, is the row's
    last) of every piece.
    """
    if cu_seqlens is not None:
        return [(0, n, int(cu_seqlens[n]), int(cu_seqlens[n + 1]), True, True) for n in range(N)]
    pieces = []
    for b in range(B):
        ids = np.zeros(T, int) if segment_ids is None else np.asarray(segment_ids)[b]
        cuts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1), T]
        for j, (lo, hi) in enumerate(itertools.pairwise(cuts)):
            pieces.append((b, b, int(lo), int(hi), j == 0, j == len(cuts) - 2))
    return pieces


def _walk(forward, backward, tokens, s0, do, ds, grads, segment_ids, cu_seqlens):
    B, T = tokens[0].shape[:2]
    o = np.zeros((*tokens[0].shape[:3], s0.shape[-1]))
    final, ds0 = np.zeros_like(s0), np.zeros_like(s0)
    for b, n, lo, hi, first, last in _rows(B, T, s0.shape[0], segment_ids, cu_seqlens):
        S = s0[n] if first else np.zeros_like(s0[n])
        states = []
        for t in range(lo, hi):
            states.append(S)
            o[b, t], S = forward(S, *(x[b, t] for x in tokens))
        if last:
            final[n] = S
        if do is None:
            continue
        D = ds[n] if last else np.zeros_like(ds[n])
        for t in reversed(range(lo, hi)):
            D = backward(states[t - lo], D, do[b, t], [g[b, t] for g in grads], *(x[b, t] for x in tokens))
        if first:
            ds0[n] = D
    return o, final, ds0


def rwkv6(r, k, v, w, u, s0, do=None, ds=None, *, scale=1.0, segment_ids=None, cu_seqlens=None):
    """Returns (o, final) and, with cotangents, (dr, dk, dv, dw, du, ds0)."""
    r, k, v, w, u, s0 = (np.asarray(x, np.float64) for x in (r, k, v, w, u, s0))
    do = None if do is None else scale * np.asarray(do, np.float64)
    ds = None if ds is None else np.asarray(ds, np.float64)
    du = np.zeros_like(u)

    def forward(S, r, k, v, w):
        return np.einsum("hk,hkv->hv", r, S) + (r * u * k).sum(-1, keepdims=True) * v, np.exp(w)[
            ..., None
        ] * S + k[..., None] * v[:, None, :]

    def backward(S, D, dy, grads, r, k, v, w):
        dr, dk, dv, dw = grads
        p = (dy * v).sum(-1, keepdims=True)
        dr[:] = np.einsum("hkv,hv->hk", S, dy) + p * u * k
        dk[:] = np.einsum("hkv,hv->hk", D, v) + p * u * r
        dv[:] = np.einsum("hkv,hk->hv", D, k) + (r * u * k).sum(-1, keepdims=True) * dy
        dw[:] = np.exp(w) * (S * D).sum(-1)
        du[:] += p * r * k
        return np.exp(w)[..., None] * D + r[..., None] * dy[:, None, :]

    grads = [np.zeros_like(x) for x in (r, k, v, w)]
    o, final, ds0 = _walk(forward, backward, (r, k, v, w), s0, do, ds, grads, segment_ids, cu_seqlens)
    return ((scale * o, final),) if do is None else ((scale * o, final), (*grads, du, ds0))


def rwkv7(r, w, k, v, a, b, s0, do=None, ds=None, *, scale=1.0, segment_ids=None, cu_seqlens=None):
    """Returns (o, final) and, with cotangents, (dr, dw, dk, dv, da, db, ds0)."""
    r, w, k, v, a, b, s0 = (np.asarray(x, np.float64) for x in (r, w, k, v, a, b, s0))
    do = None if do is None else scale * np.asarray(do, np.float64)
    ds = None if ds is None else np.asarray(ds, np.float64)

    def after(S, w, k, v, a, b):
        return (
            np.exp(w)[..., None] * S
            + b[..., None] * np.einsum("hk,hkv->hv", a, S)[:, None, :]
            + k[..., None] * v[:, None, :]
        )

    def forward(S, r, w, k, v, a, b):
        S = after(S, w, k, v, a, b)
        return np.einsum("hk,hkv->hv", r, S), S

    def backward(S, D, dy, grads, r, w, k, v, a, b):
        dr, dw, dk, dv, da, db = grads
        dr[:] = np.einsum("hkv,hv->hk", after(S, w, k, v, a, b), dy)
        D = D + r[..., None] * dy[:, None, :]
        dsa = np.einsum("hkv,hk->hv", D, b)
        dk[:] = np.einsum("hkv,hv->hk", D, v)
        dv[:] = np.einsum("hkv,hk->hv", D, k)
        da[:] = np.einsum("hkv,hv->hk", S, dsa)
        db[:] = np.einsum("hkv,hv->hk", D, np.einsum("hk,hkv->hv", a, S))
        dw[:] = np.exp(w) * (S * D).sum(-1)
        return np.exp(w)[..., None] * D + a[..., None] * dsa[:, None, :]

    grads = [np.zeros_like(x) for x in (r, w, k, v, a, b)]
    o, final, ds0 = _walk(forward, backward, (r, w, k, v, a, b), s0, do, ds, grads, segment_ids, cu_seqlens)
    return ((scale * o, final),) if do is None else ((scale * o, final), (*grads, ds0))
