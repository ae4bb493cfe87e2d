"""flash-linear-attention's names and shapes of a model from the official ones, without the code under test.

`tensors` follows FLA's converters (``utils/convert_from_rwkv6.py``, ``convert_from_rwkv7.py``) in NumPy.
"""

from __future__ import annotations

import os

import numpy as np


def tensors(version, z, layers):
    return {6: _tensors6, 7: _tensors7}[version](z, layers)


def save(folder, tensors, name="model.safetensors"):
    from safetensors.numpy import save_file

    os.makedirs(folder, exist_ok=True)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, os.path.join(folder, name))


def load(folder, name="model.safetensors"):
    from safetensors import safe_open

    with safe_open(os.path.join(folder, name), "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _outer(z):
    """What both versions have besides their blocks."""
    out = {"model.embeddings.weight": z["emb.weight"], "lm_head.weight": z["head.weight"]}
    for leaf in ("weight", "bias"):
        out |= {
            f"model.norm.{leaf}": z[f"ln_out.{leaf}"],
            f"model.layers.0.pre_norm.{leaf}": z[f"blocks.0.ln0.{leaf}"],
        }
    return out


def _tensors6(z, layers):
    out = _outer(z)
    for i in range(layers):
        to, att, ffn = f"model.layers.{i}.", f"blocks.{i}.att.", f"blocks.{i}.ffn."
        for leaf in ("weight", "bias"):
            out[f"{to}attn_norm.{leaf}"], out[f"{to}ffn_norm.{leaf}"] = (
                z[f"blocks.{i}.ln1.{leaf}"],
                z[f"blocks.{i}.ln2.{leaf}"],
            )
            out[f"{to}attn.g_norm.{leaf}"] = z[f"{att}ln_x.{leaf}"]
        C = z[f"{att}time_maa_w1"].shape[0]
        w, k, v, r, g = np.moveaxis(z[f"{att}time_maa_w1"].reshape(C, 5, -1), 1, 0)
        out[f"{to}attn.x_proj.0.linear.weight"] = np.concatenate([r, w, k, v, g], 1).T
        w, k, v, r, g = z[f"{att}time_maa_w2"]
        out[f"{to}attn.x_proj.2.weight"] = np.concatenate([r, w, k, v, g], 0).T
        out[f"{to}attn.x_bias"] = np.stack([z[f"{att}time_maa_{n}"].reshape(-1) for n in "rwkvg"])
        out[f"{to}attn.x_proj.0.mu"] = z[f"{att}time_maa_x"].reshape(-1)
        for short, name in zip("rkvg", ("receptance", "key", "value", "gate")):
            out[f"{to}attn.{short}_proj.linear.weight"] = z[f"{att}{name}.weight"]
        out[f"{to}attn.o_proj.weight"] = z[f"{att}output.weight"]
        out[f"{to}attn.w_proj.linear.lora.0.weight"] = z[f"{att}time_decay_w1"].T
        out[f"{to}attn.w_proj.linear.lora.2.weight"] = z[f"{att}time_decay_w2"].T
        out[f"{to}attn.w_proj.linear.lora.2.bias"] = z[f"{att}time_decay"].reshape(-1)
        out[f"{to}attn.bonus"] = z[f"{att}time_faaaa"]
        for name, short in (("key", "k"), ("receptance", "r")):
            out[f"{to}ffn.{name}.linear.weight"], out[f"{to}ffn.{name}.mu"] = (
                z[f"{ffn}{name}.weight"],
                z[f"{ffn}time_maa_{short}"].reshape(-1),
            )
        out[f"{to}ffn.value.weight"] = z[f"{ffn}value.weight"]
    return out


def _tensors7(z, layers):
    out = _outer(z)
    for i in range(layers):
        to, att = f"model.layers.{i}.", f"blocks.{i}.att."
        for leaf in ("weight", "bias"):
            out[f"{to}attn_norm.{leaf}"], out[f"{to}ffn_norm.{leaf}"] = (
                z[f"blocks.{i}.ln1.{leaf}"],
                z[f"blocks.{i}.ln2.{leaf}"],
            )
            out[f"{to}attn.g_norm.{leaf}"] = z[f"{att}ln_x.{leaf}"]
        out |= {f"{to}attn.x_{n}": z[f"{att}x_{n}"] for n in "rwkvag"}
        out |= {f"{to}attn.{n}": z[f"{att}{n}"].reshape(-1) for n in ("k_k", "k_a")}
        out[f"{to}attn.r_k"] = z[f"{att}r_k"]
        for short, name in zip("rkvo", ("receptance", "key", "value", "output")):
            out[f"{to}attn.{short}_proj.weight"] = z[f"{att}{name}.weight"]
        for n in "wag" if i == 0 else "wavg":
            out[f"{to}attn.{n}_lora.lora.0.weight"], out[f"{to}attn.{n}_lora.lora.2.weight"] = (
                z[f"{att}{n}1"].T,
                z[f"{att}{n}2"].T,
            )
            if n != "g":
                out[f"{to}attn.{n}_lora.lora.2.bias"] = z[f"{att}{n}0"].reshape(-1)
        out[f"{to}ffn.x_k"] = z[f"blocks.{i}.ffn.x_k"].reshape(-1)
        out |= {f"{to}ffn.{n}.weight": z[f"blocks.{i}.ffn.{n}.weight"] for n in ("key", "value")}
    return out
