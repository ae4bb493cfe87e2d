"""Norm, token shift and mixes in NumPy, float64, token by token, gradients by hand: independent of the op."""

from __future__ import annotations

from typing import Any

import numpy as np


def wide(x: Any) -> Any:
    return None if x is None else np.asarray(x).astype(np.float64)


def results(
    x, mixes, *, y=None, scale=None, bias=None, last=None, moves=None, segment_ids=None, eps=1e-5
) -> dict[str, np.ndarray]:
    """``mixed`` [M, B, T, C], ``last``, ``x``, ``normalised`` and what `gradients` reads."""
    x, y, scale, bias, last, moves = map(wide, (x, y, scale, bias, last, moves))
    mixes = [wide(mu) for mu in mixes]
    B, T, C = x.shape
    total = x if y is None else x + y
    h, unit, rstd = np.empty_like(x), np.zeros_like(x), np.ones((B, T))
    before, seen = np.zeros_like(x), np.zeros((B, T), bool)
    mixed, weights = np.empty((2, len(mixes), B, T, C))
    for b in range(B):
        for t in range(T):
            token = total[b, t]
            if scale is not None:
                centred = token - token.sum() / C
                rstd[b, t] = 1 / np.sqrt((centred * centred).sum() / C + eps)
                unit[b, t] = centred * rstd[b, t]
                token = unit[b, t] * scale + bias
            h[b, t] = token
            if t == 0:
                before[b, t] = 0 if last is None else last[b]
            elif segment_ids is None or segment_ids[b, t] == segment_ids[b, t - 1]:
                before[b, t], seen[b, t] = h[b, t - 1], True
            for n, mu in enumerate(mixes):
                weights[n, b, t] = mu if moves is None else mu + moves[n, b, t]
                mixed[n, b, t] = token * (1 - weights[n, b, t]) + before[b, t] * weights[n, b, t]
    return dict(
        mixed=mixed,
        last=h[:, -1],
        x=total,
        normalised=h,
        before=before,
        seen=seen,
        weights=weights,
        unit=unit,
        rstd=rstd,
    )


def gradients(made: dict[str, np.ndarray], scale, dmixed, dlast, dx=None, dnormalised=None) -> dict[str, Any]:
    """Gradients by name, ``mixes`` [M, C], of what `results` made, from cotangents of its results."""
    scale, dmixed, dlast, dx, dnormalised = map(wide, (scale, dmixed, dlast, dx, dnormalised))
    h, before, seen, weights = made["normalised"], made["before"], made["seen"], made["weights"]
    M, B, T, C = weights.shape
    dmoves = np.empty_like(weights)
    dh = np.zeros_like(h) if dnormalised is None else dnormalised.copy()
    first, tokens = np.zeros((B, C)), np.zeros_like(h) if dx is None else dx.copy()
    dscale, dbias = np.zeros(C), np.zeros(C)
    for b in range(B):
        dh[b, T - 1] += dlast[b]
        for t in range(T):
            for n in range(M):
                g = dmixed[n, b, t]
                dmoves[n, b, t] = g * (before[b, t] - h[b, t])
                dh[b, t] += g * (1 - weights[n, b, t])
                if seen[b, t]:
                    dh[b, t - 1] += g * weights[n, b, t]
                elif t == 0:
                    first[b] += g * weights[n, b, t]
        for t in range(T):
            token = dh[b, t]
            if scale is not None:
                unit = made["unit"][b, t]
                dscale, dbias = dscale + token * unit, dbias + token
                token = token * scale
                token = made["rstd"][b, t] * (token - token.sum() / C - unit * (token * unit).sum() / C)
            tokens[b, t] += token
    return dict(
        x=tokens, y=tokens, mixes=dmoves.sum((1, 2)), moves=dmoves, last=first, scale=dscale, bias=dbias
    )
