"""The official models in NumPy, float64, token by token, without the code under test.

`checkpoint` maps parameters to official names and shapes (Linear weights are [out, in]); `run` reads it.
"""

from __future__ import annotations

import numpy as np


def checkpoint(params, version):
    """Unscanned parameters -> {official name: float32 array in the official shape}."""
    z = {}

    def visit(tree, name):
        for key, value in tree.items():
            if isinstance(value, dict):
                visit(value, [*name, *key.replace("blocks_", "blocks.").split("/")])
                continue
            x = np.asarray(value, np.float32)
            leaf = {"kernel": "weight", "embedding": "weight", "scale": "weight"}.get(key, key)
            x = x.T if key == "kernel" else x
            if name[-1] in ("att", "ffn") and x.ndim == 1:
                x = x[None, None]
            z[".".join([*name, leaf])] = np.ascontiguousarray(x)

    visit(params, [])
    for leaf in ("weight", "bias"):
        z[f"blocks.0.ln0.{leaf}"] = z.pop(f"ln0.{leaf}")
    return z


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, weight, bias, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * weight + bias


def lookup(z, prefix):
    """{short name: squeezed float64 array} below ``prefix``."""
    return {
        name[len(prefix) :]: np.squeeze(np.asarray(x, np.float64))
        for name, x in z.items()
        if name.startswith(prefix)
    }


def time_mix6(p, x, last, S):
    """One token x [C] of RWKV-6's attention; S [H, K, V]."""
    H, N, _ = S.shape
    d = last - x
    low = np.tanh((x + d * p["time_maa_x"]) @ p["time_maa_w1"]).reshape(5, -1)
    mixed = {n: x + d * (p[f"time_maa_{n}"] + low[i] @ p["time_maa_w2"][i]) for i, n in enumerate("wkvrg")}
    r, k, v = (p[f"{name}.weight"] @ mixed[name[0]] for name in ("receptance", "key", "value"))
    g = p["gate.weight"] @ mixed["g"]
    g = g * sigmoid(g)
    w = np.exp(
        -np.exp(p["time_decay"] + np.tanh(mixed["w"] @ p["time_decay_w1"]) @ p["time_decay_w2"])
    ).reshape(H, N)
    r, k, v, u = (a.reshape(H, N) for a in (r, k, v, p["time_faaaa"]))
    y = np.zeros((H, N))
    new = np.zeros_like(S)
    for h in range(H):
        kv = np.outer(k[h], v[h])
        y[h] = r[h] @ (S[h] + u[h][:, None] * kv)
        new[h] = w[h][:, None] * S[h] + kv
    y = norm(y, p["ln_x.weight"].reshape(H, N), p["ln_x.bias"].reshape(H, N), 64e-5).reshape(-1)
    return p["output.weight"] @ (y * g), new


def time_mix7(p, x, last, S, v_first, layer, rate_scale=1.0):
    """One token x [C] of RWKV-7's attention; S [H, K, V]."""
    H, N, _ = S.shape
    m = {n: x + (last - x) * p[f"x_{n}"] for n in "rwkvag"}
    r, k, v = (p[f"{name}.weight"] @ m[name[0]] for name in ("receptance", "key", "value"))
    w = np.exp(-np.exp(-0.5) * sigmoid(p["w0"] + np.tanh(m["w"] @ p["w1"]) @ p["w2"])).reshape(H, N)
    a = sigmoid(p["a0"] + m["a"] @ p["a1"] @ p["a2"])
    g = sigmoid(m["g"] @ p["g1"]) @ p["g2"]
    if layer == 0:
        v_first = v
    else:
        v = v + (v_first - v) * sigmoid(p["v0"] + m["v"] @ p["v1"] @ p["v2"])
    kk = (k * p["k_k"]).reshape(H, N)
    kk = kk / np.maximum(np.sqrt((kk**2).sum(-1, keepdims=True)), 1e-12)
    k = k * (1 + (a - 1) * p["k_a"])
    r, k, v, a = (t.reshape(H, N) for t in (r, k, v, a))
    y = np.zeros((H, N))
    new = np.zeros_like(S)
    for h in range(H):
        transition = np.diag(w[h]) - np.outer(kk[h] * a[h] * rate_scale, kk[h])
        new[h] = transition @ S[h] + np.outer(k[h], v[h])
        y[h] = r[h] @ new[h]
    y = norm(y, p["ln_x.weight"].reshape(H, N), p["ln_x.bias"].reshape(H, N), 64e-5)
    y = y + (r * k * p["r_k"]).sum(-1, keepdims=True) * v
    return p["output.weight"] @ (y.reshape(-1) * g), new, v_first


def channel_mix6(p, x, last):
    k = x + (last - x) * p["time_maa_k"]
    r = x + (last - x) * p["time_maa_r"]
    return sigmoid(p["receptance.weight"] @ r) * (p["value.weight"] @ np.maximum(p["key.weight"] @ k, 0) ** 2)


def channel_mix7(p, x, last):
    k = x + (last - x) * p["x_k"]
    return p["value.weight"] @ np.maximum(p["key.weight"] @ k, 0) ** 2


def run(z, version, tokens, state=None, *, heads, rate_scale=1.0):
    """Logits [T, V] and state (att_shift [L, C], ffn_shift [L, C], wkv [L, H, K, V]) of one sequence."""
    L = 1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))
    top = lookup(z, "")
    C = top["emb.weight"].shape[1]
    if state is None:
        state = np.zeros((L, C)), np.zeros((L, C)), np.zeros((L, heads, C // heads, C // heads))
    att_shift, ffn_shift, wkv = (np.array(s, np.float64) for s in state)
    logits = []
    layers = [
        (lookup(z, f"blocks.{i}."), lookup(z, f"blocks.{i}.att."), lookup(z, f"blocks.{i}.ffn."))
        for i in range(L)
    ]
    for token in tokens:
        x = norm(top["emb.weight"][token], top["blocks.0.ln0.weight"], top["blocks.0.ln0.bias"])
        v_first = None
        for i, (block, att, ffn) in enumerate(layers):
            h = norm(x, block["ln1.weight"], block["ln1.bias"])
            if version == 6:
                y, wkv[i] = time_mix6(att, h, att_shift[i], wkv[i])
            else:
                y, wkv[i], v_first = time_mix7(att, h, att_shift[i], wkv[i], v_first, i, rate_scale)
            att_shift[i] = h
            x = x + y
            h = norm(x, block["ln2.weight"], block["ln2.bias"])
            x = x + (channel_mix6 if version == 6 else channel_mix7)(ffn, h, ffn_shift[i])
            ffn_shift[i] = h
        logits.append(top["head.weight"] @ norm(x, top["ln_out.weight"], top["ln_out.bias"]))
    return np.array(logits), (att_shift, ffn_shift, wkv)


def file(version, params, dtype=np.float32):
    """A file's tensors in the official names and layouts, by the mapping that the equations' oracle uses."""
    return {name: x.astype(dtype) for name, x in checkpoint(params, version).items()}
