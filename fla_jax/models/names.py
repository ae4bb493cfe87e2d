"""Names and layouts of the parameters in checkpoints: RWKV-LM's own ("official") and flash-linear-attention's ("fla"), of RWKV-6 and RWKV-7.

A leaf of our parameters is written as a path, "emb/embedding" or, inside a layer, "att/receptance/kernel"; `entry` says where it is in a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .files import quoted


class Layout(NamedTuple):
    """How a file holds a parameter: ``load`` makes the file's array ours, ``save`` ours the file's; views where possible."""

    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]


# The five parts of RWKV-6's token shift: w, k, v, r, g in official files and here, r, w, k, v, g in FLA's.
_TO_FLA, _FROM_FLA = [3, 0, 1, 2, 4], [1, 2, 3, 0, 4]

_SAME = Layout(lambda x: x, lambda x: x)
_VECTOR = Layout(lambda x: x.reshape(-1), lambda x: x)
_UNIT_AXES = Layout(lambda x: x.reshape(-1), lambda x: x[None, None])  # [1, 1, C]
_TRANSPOSED = Layout(lambda x: x.T, lambda x: x.T)
_FLA_SHIFT_DOWN = Layout(  # [5 R, C] and our [C, 5 R]
    lambda x: x.reshape(5, -1, x.shape[1])[_FROM_FLA].reshape(x.shape).T,
    lambda x: x.T.reshape(5, -1, x.shape[0])[_TO_FLA].reshape(x.shape[::-1]),
)
_FLA_SHIFT_UP = Layout(  # [C, 5 R] and our [5, R, C]
    lambda x: x.T.reshape(5, -1, x.shape[0])[_FROM_FLA],
    lambda x: x[_TO_FLA].reshape(-1, x.shape[2]).T,
)

_TOP = ("emb", "ln0", "ln_out", "head")
_FLA_TOP = {"emb": "model.embeddings", "ln0": "model.layers.0.pre_norm", "ln_out": "model.norm", "head": "lm_head"}
_FLA = {
    6: {
        "ln1": "attn_norm",
        "ln2": "ffn_norm",
        "att/time_maa_x": "attn.x_proj.0.mu",
        "att/time_maa_w1": "attn.x_proj.0.linear.weight",
        "att/time_maa_w2": "attn.x_proj.2.weight",
        **{f"att/time_maa_{name}": f"attn.x_bias[{i}]" for i, name in enumerate("rwkvg")},
        "att/time_decay": "attn.w_proj.linear.lora.2.bias",
        "att/time_decay_w1": "attn.w_proj.linear.lora.0.weight",
        "att/time_decay_w2": "attn.w_proj.linear.lora.2.weight",
        "att/time_faaaa": "attn.bonus",
        "att/receptance": "attn.r_proj.linear",
        "att/key": "attn.k_proj.linear",
        "att/value": "attn.v_proj.linear",
        "att/gate": "attn.g_proj.linear",
        "att/output": "attn.o_proj",
        "att/ln_x": "attn.g_norm",
        "ffn/time_maa_k": "ffn.key.mu",
        "ffn/time_maa_r": "ffn.receptance.mu",
        "ffn/key": "ffn.key.linear",
        "ffn/receptance": "ffn.receptance.linear",
        "ffn/value": "ffn.value",
    },
    7: {
        "ln1": "attn_norm",
        "ln2": "ffn_norm",
        **{f"att/{name}": f"attn.{name}" for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "r_k")},
        **{f"att/{name}0": f"attn.{name}_lora.lora.2.bias" for name in "wav"},
        **{f"att/{name}1": f"attn.{name}_lora.lora.0.weight" for name in "wavg"},
        **{f"att/{name}2": f"attn.{name}_lora.lora.2.weight" for name in "wavg"},
        "att/receptance": "attn.r_proj",
        "att/key": "attn.k_proj",
        "att/value": "attn.v_proj",
        "att/output": "attn.o_proj",
        "att/ln_x": "attn.g_norm",
        "ffn/x_k": "ffn.x_k",
        "ffn/key": "ffn.key",
        "ffn/value": "ffn.value",
    },
}
_FLA_LAYOUTS = {"time_maa_w1": _FLA_SHIFT_DOWN, "time_maa_w2": _FLA_SHIFT_UP}
_FLAX_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
# Tensors of FLA's files that hold several parameters: x_x is what RWKV-7's x_r, ..., x_g were before.
STACKED = {"attn.x_bias": [f"attn.x_bias[{i}]" for i in range(5)], "attn.x_x": [f"attn.x_{name}" for name in "rwkvag"]}
# Read before this package's names are looked for: variants that share many of them.
REFUSED = {
    r"\.ffn\.s_emb": "RWKV-7a (deep embedding)",
    r"\.att\.qkv|\.qkv\.|k_emb": "RWKV-7b",
    r"\.time_mix_": "RWKV-4 or RWKV-5",
    r"\.attn\.q_proj\.": "a hybrid with softmax attention",
}
_LAYER = {"official": "blocks.", "fla": "model.layers."}


def entry(style: str, version: int, leaf: str, ndim: int, layer: int | None = None) -> tuple[str, Layout]:
    """Name and layout of a parameter in a file.

    Args:
        style: "official" or "fla".
        version: 6 or 7.
        leaf: the parameter's path, without the layer.
        ndim: number of its axes, without a stacked layer axis.
        layer: None for parameters outside the layers.
    """
    owner, _, last = leaf.rpartition("/")
    suffix = "." + _FLAX_LEAVES[last] if last in _FLAX_LEAVES else ""
    owner = owner if suffix else leaf
    prefix = "" if layer is None else f"{_LAYER[style]}{layer}."
    layout = _TRANSPOSED if last == "kernel" else _VECTOR if ndim == 1 else _SAME
    if style == "official":
        if ndim == 1 and not suffix:
            layout = _UNIT_AXES
        return prefix + ("blocks.0.ln0" if owner == "ln0" else owner.replace("/", ".")) + suffix, layout
    name = _FLA_TOP[owner] if layer is None else _FLA[version][owner]
    if last in _FLA_LAYOUTS:
        layout = _FLA_LAYOUTS[last]
    elif ".lora." in name and ndim == 2:
        layout = _TRANSPOSED
    elif name.startswith("attn.x_") and version == 7:
        layout = _UNIT_AXES
    return prefix + name + suffix, layout


def identify(names: list[str]) -> tuple[str, int]:
    """Style and version of a file with these names.

    Raises:
        ValueError: none that is known.
    """
    for pattern, variant in REFUSED.items():
        for name in names:
            if re.search(pattern, name):
                known = "known are RWKV-6 (x060) and RWKV-7 (x070)"
                raise ValueError(f"{quoted(name)} belongs to {variant}; {known}")
    for name in names:
        for pattern, found in {
            r"blocks\.\d+\.att\.r_k": ("official", 7),
            r"blocks\.\d+\.att\.time_maa_x": ("official", 6),
            r"model\.layers\.\d+\.attn\.r_k": ("fla", 7),
            r"model\.layers\.\d+\.attn\.bonus": ("fla", 6),
        }.items():
            if re.fullmatch(pattern, name):
                return found
    missing = "no att.r_k, att.time_maa_x, attn.r_k or attn.bonus in any layer"
    raise ValueError(f"its names are not those of RWKV-6 or RWKV-7, be it RWKV-LM's or FLA's: {missing}")


def layer_of(style: str, name: str) -> int | None:
    """The layer that a name belongs to."""
    found = re.match(re.escape(_LAYER[style]) + r"(\d{1,6})\.", name)
    return int(found[1]) if found else None


def is_extra(style: str, name: str) -> bool:
    """Whether a tensor may be there or not: layer 0's v0, v1, v2, which nothing reads, and tuned initial states."""
    if style == "fla":
        return name.startswith("model.layers.0.attn.v_lora.")
    return re.fullmatch(r"blocks\.0\.att\.v[012]|blocks\.\d+\.att\.time_state", name) is not None
