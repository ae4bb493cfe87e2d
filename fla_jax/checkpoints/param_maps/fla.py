"""flash-linear-attention's names of RWKV-6 and RWKV-7.

Source: flash-linear-attention ``fla/models/rwkv{6,7}``, ``fla/layers/rwkv{6,7}.py``,
``utils/convert_from_rwkv{6,7}.py``.
"""

from __future__ import annotations

import numpy as np

from ...models import FAMILIES, RWKV6Config, RWKV7Config, RWKVConfig, family_of
from ..files import Json
from .param_map import (
    SAME,
    TRANSPOSED,
    UNIT_AXES,
    VECTOR,
    ParamMap,
    TensorRef,
    Transform,
    any_shape,
    check_time_state,
    dense,
    model_refs,
)

PREFIX = r"(_forward_module\.)?"
LAYER = r"model\.layers\.(0|[1-9][0-9]{0,5})\."
_LAYER = "model.layers.{}."
_ATT, _FFN = _LAYER + "attn.", _LAYER + "ffn."
TIME_STATE = _ATT + "time_state"  # RWKV-PEFT's word; FLA's code leaves it out, with a warning
_TIME_STATES = {LAYER + r"attn\.time_state": check_time_state}
NAMES = {
    "emb": "model.embeddings",
    "ln0": "model.layers.0.pre_norm",
    "ln1": _LAYER + "attn_norm",
    "ln2": _LAYER + "ffn_norm",
    "ln_x": _ATT + "g_norm",
    "ln_out": "model.norm",
    "head": "lm_head",
}

# The five mixes of the token shift: w, k, v, r, g in official files and here, r, w, k, v, g in FLA's.
_TO_FLA, _FROM_FLA = [3, 0, 1, 2, 4], [1, 2, 3, 0, 4]
_SHIFT_DOWN = Transform(  # [5 R, C] and our [C, 5 R]
    lambda x: x.reshape(5, -1, x.shape[1])[_FROM_FLA].reshape(x.shape).T,
    lambda x: x.T.reshape(5, -1, x.shape[0])[_TO_FLA].reshape(x.shape[::-1]),
)
_SHIFT_UP = Transform(  # [C, 5 R] and our [5, R, C]
    lambda x: x.T.reshape(5, -1, x.shape[0])[_FROM_FLA],
    lambda x: x[_TO_FLA].reshape(-1, x.shape[2]).T,
)


def _config_json(config: RWKVConfig, dtype: np.dtype) -> dict[str, Json]:
    """The fields of ``config.json`` that both versions have."""
    C = config.hidden_size
    assert config.intermediate_size is not None
    return {
        "architectures": [family_of(config).model.__name__],
        "model_type": config.model_type,
        "attn_mode": "chunk",
        "vocab_size": config.vocab_size,
        "hidden_size": C,
        "num_hidden_layers": config.num_layers,
        "num_heads": C // config.head_dim,
        "hidden_ratio": config.intermediate_size / C,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "sqrelu",
        "norm_first": config.norm_first,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": 0,  # RWKV's documents are separated by token 0
        "eos_token_id": 0,
        "pad_token_id": None,  # the embedding of a padding token is not trained by PyTorch
        "torch_dtype": str(dtype),
    }


def _config_json6(config: RWKV6Config, dtype: np.dtype) -> dict[str, Json]:
    """Source: flash-linear-attention ``fla/models/rwkv6/configuration_rwkv6.py``."""
    # FLA calls the rank of the decay that of a gate
    ranks = {"proj_low_rank_dim": config.proj_low_rank_dim, "gate_low_rank_dim": config.decay_low_rank_dim}
    return {**_config_json(config, dtype), "expand_k": 1.0, "expand_v": 1.0, **ranks}


def _config_json7(config: RWKV7Config, dtype: np.dtype) -> dict[str, Json]:
    """Source: flash-linear-attention ``fla/models/rwkv7/configuration_rwkv7.py``."""
    ranks = {name: getattr(config, name) for name in FLA7.family.sizes if name.endswith("_low_rank_dim")}
    widths = {"head_dim": config.head_dim, "value_dim": [config.hidden_size] * config.num_layers}
    return {**_config_json(config, dtype), **widths, **ranks}


FLA6 = ParamMap(
    "FLA's RWKV-6",
    "fla",
    FAMILIES["rwkv6"],
    mark=LAYER + r"attn\.bonus",
    layer=LAYER,
    refs=model_refs(
        NAMES,
        att={
            "blocks/att/time_maa_x": TensorRef(_ATT + "x_proj.0.mu", VECTOR),
            "blocks/att/time_maa_w1": TensorRef(_ATT + "x_proj.0.linear.weight", _SHIFT_DOWN),
            "blocks/att/time_maa_w2": TensorRef(_ATT + "x_proj.2.weight", _SHIFT_UP),
            **{
                f"blocks/att/time_maa_{name}": TensorRef(f"{_ATT}x_bias[{i}]", VECTOR)
                for i, name in enumerate("rwkvg")
            },
            "blocks/att/time_decay": TensorRef(_ATT + "w_proj.linear.lora.2.bias", VECTOR),
            "blocks/att/time_decay_w1": TensorRef(_ATT + "w_proj.linear.lora.0.weight", TRANSPOSED),
            "blocks/att/time_decay_w2": TensorRef(_ATT + "w_proj.linear.lora.2.weight", TRANSPOSED),
            "blocks/att/time_faaaa": TensorRef(_ATT + "bonus", SAME),
            **dense(
                "blocks/att",
                _LAYER + "attn",
                "receptance=r_proj.linear key=k_proj.linear value=v_proj.linear gate=g_proj.linear "
                "output=o_proj",
            ),
        },
        ffn={
            "blocks/ffn/time_maa_k": TensorRef(_FFN + "key.mu", VECTOR),
            "blocks/ffn/time_maa_r": TensorRef(_FFN + "receptance.mu", VECTOR),
            **dense("blocks/ffn", _LAYER + "ffn", "key=key.linear receptance=receptance.linear value"),
        },
    ),
    extras=_TIME_STATES,
    time_state=TIME_STATE,
    prefix=PREFIX,
    slices={"attn.x_bias": tuple(f"attn.x_bias[{i}]" for i in range(5))},
    can_tie=True,
    config_json=_config_json6,
)
FLA7 = ParamMap(
    "FLA's RWKV-7",
    "fla",
    FAMILIES["rwkv7"],
    mark=LAYER + r"attn\.r_k",
    layer=LAYER,
    refs=model_refs(
        NAMES,
        att={
            **{f"blocks/att/x_{name}": TensorRef(f"{_ATT}x_{name}", UNIT_AXES) for name in "rwkvag"},
            **{f"blocks/att/{name}0": TensorRef(f"{_ATT}{name}_lora.lora.2.bias", VECTOR) for name in "wav"},
            **{
                f"blocks/att/{name}{i}": TensorRef(f"{_ATT}{name}_lora.lora.{stage}.weight", TRANSPOSED)
                for i, stage in ((1, 0), (2, 2))
                for name in "wavg"
            },
            "blocks/att/k_k": TensorRef(_ATT + "k_k", VECTOR),
            "blocks/att/k_a": TensorRef(_ATT + "k_a", VECTOR),
            "blocks/att/r_k": TensorRef(_ATT + "r_k", SAME),
            **dense("blocks/att", _LAYER + "attn", "receptance=r_proj key=k_proj value=v_proj output=o_proj"),
        },
        ffn={
            "blocks/ffn/x_k": TensorRef(_FFN + "x_k", VECTOR),
            **dense("blocks/ffn", _LAYER + "ffn", "key value"),
        },
    ),
    extras={r"model\.layers\.0\.attn\.v_lora\..*": any_shape, **_TIME_STATES},  # no program reads layer 0's
    time_state=TIME_STATE,
    prefix=PREFIX,
    slices={"attn.x_x": tuple(f"attn.x_{name}" for name in "rwkvag")},  # of older files
    can_tie=True,
    config_json=_config_json7,
)
