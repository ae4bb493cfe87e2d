"""RWKV-7's keys and both readouts in NumPy, float64, gradients by hand: independent of the code under test.

Arrays come and go by name. Inputs are cast to float64 exactly, so a comparison measures the error of the op
and not of its inputs' rounding.
"""

from __future__ import annotations

import numpy as np

Arrays = dict[str, np.ndarray]


def wide(arrays: Arrays) -> Arrays:
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


def logistic(x):
    return np.where(x > 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def keys(x: Arrays, cotangents: Arrays | None = None, *, residual: bool = True, rate_scale: float = 1.0):
    """Results by name, and gradients where cotangents are given. Without ``mix`` there is no residual."""
    x, mixed = wide(x), "mix" in x
    low = -1 / np.sqrt(np.e)
    # a sigmoid and one less it, which float64 too has few digits of as a difference
    s, s_rest = (logistic(sign * (x["w0"] + x["decay"])) for sign in (1, -1))
    rate, rate_rest = (logistic(sign * (x["a0"] + x["rate"])) for sign in (1, -1))
    raw = x["k"] * x["k_k"]
    length = np.linalg.norm(raw, axis=-1, keepdims=True)
    kk = raw / np.maximum(length, 1e-12)
    m, own = 0.0, 1.0
    if mixed and residual:
        m, own = (logistic(sign * (x["v0"] + x["mix"])) for sign in (1, -1))
    source = x["v_first"] if mixed and residual else x["v"]
    results = dict(
        w=low * s,
        k=x["k"] * (1 - x["k_a"] + rate * x["k_a"]),
        v=own * x["v"] + m * source,
        a=-kk,
        b=rate_scale * rate * kk,
        v_first=source,
    )
    results |= dict(k_bonus=results["k"], v_bonus=results["v"])
    if cotangents is None:
        return results, None
    c = wide(cotangents)
    c["k"], c["v"] = c["k"] + c["k_bonus"], c["v"] + c["v_bonus"]
    over_tokens = lambda y: y.sum((0, 1))
    ddecay = c["w"] * low * s * s_rest
    dkk = rate_scale * rate * c["b"] - c["a"]
    along = kk * (kk * dkk).sum(-1, keepdims=True)
    draw = np.where(length > 1e-12, (dkk - along) / np.maximum(length, 1e-12), 0)
    drate = (rate_scale * c["b"] * kk + c["k"] * x["k"] * x["k_a"]) * rate * rate_rest
    grads = dict(
        decay=ddecay,
        rate=drate,
        k=c["k"] * (1 - x["k_a"] + rate * x["k_a"]) + draw * x["k_k"],
        v=c["v"] * own,
        w0=over_tokens(ddecay),
        a0=over_tokens(drate),
        k_k=over_tokens(draw * x["k"]),
        k_a=over_tokens(-c["k"] * x["k"] * rate_rest),
    )
    if not (mixed and residual):
        grads["v"] = c["v"] + c["v_first"]
    if mixed:
        dmix = c["v"] * (source - x["v"]) * m * own
        dfirst = c["v"] * m + c["v_first"] if residual else np.zeros_like(x["v"])
        grads |= dict(mix=dmix, v0=over_tokens(dmix), v_first=dfirst)
    return results, grads


def readout(x: Arrays, cotangents: Arrays | None = None, *, eps: float = 64e-5):
    """As `keys`; RWKV-7's with r, k, v, r_k among the arrays, else RWKV-6's, whose gate goes through silu."""
    x, seven = wide(x), "r" in x
    N = x["o"].shape[-1]
    mean = x["o"].mean(-1, keepdims=True)
    deviation = np.sqrt(((x["o"] - mean) ** 2).mean(-1, keepdims=True) + eps)
    normal = (x["o"] - mean) / deviation
    inner = normal * x["scale"] + x["bias"]
    if seven:
        bonus = np.einsum("bthn,bthn,hn->bth", x["r"], x["k"], x["r_k"])[..., None]
        inner = inner + bonus * x["v"]
        factor, slope = x["gate"], 1.0
    else:
        s = logistic(x["gate"])
        factor, slope = x["gate"] * s, s + x["gate"] * s * (1 - s)
    results = dict(y=inner * factor)
    if cotangents is None:
        return results, None
    dy = wide(cotangents)["y"]
    dinner = dy * factor
    dnormal = dinner * x["scale"]
    # the Jacobian of the norm by head, written out: (I - 1/N - normal normal^T / N) / deviation
    project = np.eye(N) - 1 / N - normal[..., :, None] * normal[..., None, :] / N
    grads = dict(
        o=np.einsum("bthij,bthj->bthi", project, dnormal) / deviation,
        gate=dy * inner * slope,
        scale=(dinner * normal).sum((0, 1)),
        bias=dinner.sum((0, 1)),
    )
    if seven:
        dbonus = (dinner * x["v"]).sum(-1, keepdims=True)
        grads |= dict(
            r=dbonus * x["k"] * x["r_k"],
            k=dbonus * x["r"] * x["r_k"],
            v=bonus * dinner,
            r_k=(dbonus * x["r"] * x["k"]).sum((0, 1)),
        )
    return results, grads
