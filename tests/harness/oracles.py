"""Every op in NumPy, float64, with gradients by hand: independent of the library.

Inputs by name, cast to float64 exactly; returns ``(outputs, gradients)``, None without cotangents.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def float64(arrays: Any) -> Arrays:
    return {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}


def _documents(B, T, N, segment_ids, cu_seqlens):
    """(batch entry, state, first token, end, whether it starts and ends the states) of every document."""
    if cu_seqlens is not None:
        return [(0, n, int(cu_seqlens[n]), int(cu_seqlens[n + 1]), True, True) for n in range(N)]
    found = []
    for b in range(B):
        ids = np.zeros(T, int) if segment_ids is None else np.asarray(segment_ids)[b]
        cuts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1), T]
        for j, (lo, hi) in enumerate(itertools.pairwise(cuts)):
            found.append((b, b, int(lo), int(hi), j == 0, j == len(cuts) - 2))
    return found


def _recurrence(step, step_bwd, x: Arrays, cotangents, scale, segment_ids, cu_seqlens):
    """Runs ``step`` token by token and ``step_bwd`` in reverse through the stored states."""
    x = float64(x)
    s0 = x.pop("initial_state")
    tokens = {name: a for name, a in x.items() if a.ndim == 4}
    vectors = {name: a for name, a in x.items() if a.ndim != 4}
    o = np.zeros_like(x["v"])
    ht, ds0 = np.zeros_like(s0), np.zeros_like(s0)
    grads = {name: np.zeros_like(a) for name, a in x.items()}
    if cotangents is not None:
        cotangents = float64(cotangents)
    for b, n, lo, hi, first, last in _documents(*o.shape[:2], s0.shape[0], segment_ids, cu_seqlens):
        S, states = s0[n] if first else np.zeros_like(s0[n]), []
        for t in range(lo, hi):
            states.append(S)
            o[b, t], S = step(S, **{name: a[b, t] for name, a in tokens.items()}, **vectors)
        if last:
            ht[n] = S
        if cotangents is None:
            continue
        D = cotangents["ht"][n] if last else np.zeros_like(s0[n])
        for t in reversed(range(lo, hi)):
            at = {name: a[b, t] for name, a in tokens.items()}
            D, made = step_bwd(states[t - lo], D, scale * cotangents["o"][b, t], **at, **vectors)
            for name, g in made.items():
                if name in tokens:
                    grads[name][b, t] = g
                else:
                    grads[name] += g
        if first:
            ds0[n] = D
    outputs = {"o": scale * o, "ht": ht}
    return outputs, None if cotangents is None else grads | {"initial_state": ds0}


def rwkv6(x: Arrays, cotangents=None, *, scale=1.0, segment_ids=None, cu_seqlens=None):
    """o = r (S + u k v), S' = exp(w) S + k v."""

    def step(S, r, k, v, w, u):
        o = np.einsum("hk,hkv->hv", r, S) + (r * u * k).sum(-1, keepdims=True) * v
        return o, np.exp(w)[..., None] * S + k[..., None] * v[:, None, :]

    def step_bwd(S, D, do, r, k, v, w, u):
        p = (do * v).sum(-1, keepdims=True)
        grads = dict(
            r=np.einsum("hkv,hv->hk", S, do) + p * u * k,
            k=np.einsum("hkv,hv->hk", D, v) + p * u * r,
            v=np.einsum("hkv,hk->hv", D, k) + (r * u * k).sum(-1, keepdims=True) * do,
            w=np.exp(w) * (S * D).sum(-1),
            u=p * r * k,
        )
        return np.exp(w)[..., None] * D + r[..., None] * do[:, None, :], grads

    return _recurrence(step, step_bwd, x, cotangents, scale, segment_ids, cu_seqlens)


def rwkv7(x: Arrays, cotangents=None, *, scale=1.0, segment_ids=None, cu_seqlens=None):
    """S' = exp(w) S + b (a S) + k v, o = r S'."""

    def update(S, w, k, v, a, b):
        read = np.einsum("hk,hkv->hv", a, S)[:, None, :]
        return np.exp(w)[..., None] * S + b[..., None] * read + k[..., None] * v[:, None, :]

    def step(S, r, w, k, v, a, b):
        S = update(S, w, k, v, a, b)
        return np.einsum("hk,hkv->hv", r, S), S

    def step_bwd(S, D, do, r, w, k, v, a, b):
        dr = np.einsum("hkv,hv->hk", update(S, w, k, v, a, b), do)
        D = D + r[..., None] * do[:, None, :]
        dread = np.einsum("hkv,hk->hv", D, b)
        grads = dict(
            r=dr,
            w=np.exp(w) * (S * D).sum(-1),
            k=np.einsum("hkv,hv->hk", D, v),
            v=np.einsum("hkv,hk->hv", D, k),
            a=np.einsum("hkv,hv->hk", S, dread),
            b=np.einsum("hkv,hv->hk", D, np.einsum("hk,hkv->hv", a, S)),
        )
        return np.exp(w)[..., None] * D + a[..., None] * dread[:, None, :], grads

    return _recurrence(step, step_bwd, x, cotangents, scale, segment_ids, cu_seqlens)


def logistic(x):
    return np.where(x > 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def keys(x: Arrays, cotangents=None, *, residual: bool = True, rate_scale: float = 1.0):
    """RWKV-7's keys. Without ``mix`` there is no residual."""
    x, mixed = float64(x), "mix" in x
    low = -1 / np.sqrt(np.e)
    # a sigmoid and one less it, of which a difference in float64 would have few digits too
    s, s_rest = (logistic(sign * (x["w0"] + x["decay"])) for sign in (1, -1))
    rate, rate_rest = (logistic(sign * (x["a0"] + x["rate"])) for sign in (1, -1))
    raw = x["k"] * x["k_k"]
    length = np.linalg.norm(raw, axis=-1, keepdims=True)
    kk = raw / np.maximum(length, 1e-12)
    m, m_rest = 0.0, 1.0
    if mixed and residual:
        m, m_rest = (logistic(sign * (x["v0"] + x["mix"])) for sign in (1, -1))
    source = x["v_first"] if mixed and residual else x["v"]
    outputs = dict(
        w=low * s,
        k=x["k"] * (1 - x["k_a"] + rate * x["k_a"]),
        v=m_rest * x["v"] + m * source,
        a=-kk,
        b=rate_scale * rate * kk,
        v_first=source,
    )
    outputs |= dict(k_bonus=outputs["k"], v_bonus=outputs["v"])
    if cotangents is None:
        return outputs, None
    c = float64(cotangents)
    c["k"], c["v"] = c["k"] + c["k_bonus"], c["v"] + c["v_bonus"]
    ddecay = c["w"] * low * s * s_rest
    dkk = rate_scale * rate * c["b"] - c["a"]
    along = kk * (kk * dkk).sum(-1, keepdims=True)
    draw = np.where(length > 1e-12, (dkk - along) / np.maximum(length, 1e-12), 0)
    drate = (rate_scale * c["b"] * kk + c["k"] * x["k"] * x["k_a"]) * rate * rate_rest
    grads = dict(
        decay=ddecay,
        rate=drate,
        k=c["k"] * (1 - x["k_a"] + rate * x["k_a"]) + draw * x["k_k"],
        v=c["v"] * m_rest,
        w0=ddecay.sum((0, 1)),
        a0=drate.sum((0, 1)),
        k_k=(draw * x["k"]).sum((0, 1)),
        k_a=(-c["k"] * x["k"] * rate_rest).sum((0, 1)),
    )
    if not (mixed and residual):
        grads["v"] = c["v"] + c["v_first"]
    if mixed:
        dmix = c["v"] * (source - x["v"]) * m * m_rest
        dfirst = c["v"] * m + c["v_first"] if residual else np.zeros_like(x["v"])
        grads |= dict(mix=dmix, v0=dmix.sum((0, 1)), v_first=dfirst)
    return outputs, grads


def readout(x: Arrays, cotangents=None, *, eps: float = 64e-5):
    """RWKV-7's with r, k, v and r_k among the arrays, else RWKV-6's, whose gate passes through silu."""
    x, version7 = float64(x), "r" in x
    N = x["o"].shape[-1]
    mean = x["o"].mean(-1, keepdims=True)
    deviation = np.sqrt(((x["o"] - mean) ** 2).mean(-1, keepdims=True) + eps)
    normal = (x["o"] - mean) / deviation
    inner = normal * x["scale"] + x["bias"]
    if version7:
        bonus = np.einsum("bthn,bthn,hn->bth", x["r"], x["k"], x["r_k"])[..., None]
        inner = inner + bonus * x["v"]
        factor, slope = x["gate"], 1.0
    else:
        s = logistic(x["gate"])
        factor, slope = x["gate"] * s, s + x["gate"] * s * (1 - s)
    outputs = dict(y=inner * factor)
    if cotangents is None:
        return outputs, None
    dy = float64(cotangents)["y"]
    dinner = dy * factor
    # the Jacobian of the norm of a head: (I - 1/N - normal normal^T / N) / deviation
    project = np.eye(N) - 1 / N - normal[..., :, None] * normal[..., None, :] / N
    grads = dict(
        o=np.einsum("bthij,bthj->bthi", project, dinner * x["scale"]) / deviation,
        gate=dy * inner * slope,
        scale=(dinner * normal).sum((0, 1)),
        bias=dinner.sum((0, 1)),
    )
    if version7:
        dbonus = (dinner * x["v"]).sum(-1, keepdims=True)
        grads |= dict(
            r=dbonus * x["k"] * x["r_k"],
            k=dbonus * x["r"] * x["r_k"],
            v=bonus * dinner,
            r_k=(dbonus * x["r"] * x["k"]).sum((0, 1)),
        )
    return outputs, grads


def norm_shift_mix(x: Arrays, cotangents=None, *, segment_ids=None, eps=1e-5):
    """Norm, token shift and mixes. ``x + y`` is rounded to the dtype of ``x``, as the op rounds it."""
    dtype, x = x["x"].dtype, float64(x)
    total = (x["x"] + x["y"]).astype(dtype).astype(np.float64) if "y" in x else x["x"]
    B, T, C = total.shape
    M = len(x["mixes"])
    h, unit, rstd = np.empty_like(total), np.zeros_like(total), np.ones((B, T))
    prev, shifted = np.zeros_like(total), np.zeros((B, T), bool)
    mixed, weights = np.empty((2, M, B, T, C))
    for b, t in np.ndindex(B, T):
        token = total[b, t]
        if "scale" in x:
            centred = token - token.sum() / C
            rstd[b, t] = 1 / np.sqrt((centred * centred).sum() / C + eps)
            unit[b, t] = centred * rstd[b, t]
            token = unit[b, t] * x["scale"] + x["bias"]
        h[b, t] = token
        if t == 0:
            prev[b, t] = x["last"][b] if "last" in x else 0
        elif segment_ids is None or segment_ids[b, t] == segment_ids[b, t - 1]:
            prev[b, t], shifted[b, t] = h[b, t - 1], True
        weights[:, b, t] = x["mixes"] + (x["mix_delta"][:, b, t] if "mix_delta" in x else 0)
        mixed[:, b, t] = token * (1 - weights[:, b, t]) + prev[b, t] * weights[:, b, t]
    outputs = dict(mixed=mixed, last=h[:, -1], x=total, normalised=h)
    if cotangents is None:
        return outputs, None
    c = {name: np.zeros_like(a) for name, a in outputs.items()} | float64(cotangents)
    dh, dtotal, dlast = c["normalised"].copy(), c["x"].copy(), np.zeros((B, C))
    dmix_delta = c["mixed"] * (prev - h)
    dscale, dbias = np.zeros(C), np.zeros(C)
    dh[:, T - 1] += c["last"]
    for b, t in np.ndindex(B, T):
        dh[b, t] += (c["mixed"][:, b, t] * (1 - weights[:, b, t])).sum(0)
        dprev = (c["mixed"][:, b, t] * weights[:, b, t]).sum(0)
        if shifted[b, t]:
            dh[b, t - 1] += dprev
        elif t == 0:
            dlast[b] += dprev
    for b, t in np.ndindex(B, T):
        token = dh[b, t]
        if "scale" in x:
            u = unit[b, t]
            dscale, dbias = dscale + token * u, dbias + token
            token = token * x["scale"]
            token = rstd[b, t] * (token - token.sum() / C - u * (token * u).sum() / C)
        dtotal[b, t] += token
    grads = dict(
        x=dtotal, y=dtotal, mixes=dmix_delta.sum((1, 2)), mix_delta=dmix_delta, last=dlast, scale=dscale
    )
    return outputs, {name: g for name, g in (grads | {"bias": dbias}).items() if name in x}
