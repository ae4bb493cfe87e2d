"""flash-linear-attention's names of RWKV-6.

Source: flash-linear-attention ``fla/models/rwkv6``, ``fla/layers/rwkv6.py``, ``utils/convert_from_rwkv6.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...models import RWKV6Config
from ...models.config import RWKVConfig
from .families import RWKV6
from .param_map import SAME, TRANSPOSED, VECTOR, ParamMap, TensorRef, Transform, dense, norm

PREFIX = r"(_forward_module\.)?"
LAYER = r"model\.layers\.(0|[1-9][0-9]{0,5})\."

# The five parts of the token shift: w, k, v, r, g in official files and here, r, w, k, v, g in FLA's.
_TO_FLA, _FROM_FLA = [3, 0, 1, 2, 4], [1, 2, 3, 0, 4]
_SHIFT_DOWN = Transform(  # [5 R, C] and our [C, 5 R]
    lambda x: x.reshape(5, -1, x.shape[1])[_FROM_FLA].reshape(x.shape).T,
    lambda x: x.T.reshape(5, -1, x.shape[0])[_TO_FLA].reshape(x.shape[::-1]),
)
_SHIFT_UP = Transform(  # [C, 5 R] and our [5, R, C]
    lambda x: x.T.reshape(5, -1, x.shape[0])[_FROM_FLA],
    lambda x: x[_TO_FLA].reshape(-1, x.shape[2]).T,
)
_ATT, _FFN = "model.layers.{}.attn.", "model.layers.{}.ffn."

PLACES = {
    "emb/embedding": TensorRef("model.embeddings.weight"),
    **norm("ln0", "model.layers.0.pre_norm"),
    **norm("blocks/ln1", "model.layers.{}.attn_norm"),
    **norm("blocks/ln2", "model.layers.{}.ffn_norm"),
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
    **dense("blocks/att/receptance", _ATT + "r_proj.linear"),
    **dense("blocks/att/key", _ATT + "k_proj.linear"),
    **dense("blocks/att/value", _ATT + "v_proj.linear"),
    **dense("blocks/att/gate", _ATT + "g_proj.linear"),
    **dense("blocks/att/output", _ATT + "o_proj"),
    **norm("blocks/att/ln_x", _ATT + "g_norm"),
    "blocks/ffn/time_maa_k": TensorRef(_FFN + "key.mu", VECTOR),
    "blocks/ffn/time_maa_r": TensorRef(_FFN + "receptance.mu", VECTOR),
    **dense("blocks/ffn/key", _FFN + "key.linear"),
    **dense("blocks/ffn/receptance", _FFN + "receptance.linear"),
    **dense("blocks/ffn/value", _FFN + "value"),
    **norm("ln_out", "model.norm"),
    **dense("head", "lm_head"),
}


def common_fields(config: RWKVConfig, dtype: np.dtype, version: int) -> dict[str, Any]:
    """What FLA's configurations of both versions say."""
    C = config.hidden_size
    assert config.intermediate_size is not None
    return {
        "architectures": [f"RWKV{version}ForCausalLM"],
        "model_type": f"rwkv{version}",
        "attn_mode": "chunk",
        "vocab_size": config.vocab_size,
        "hidden_size": C,
        "num_hidden_layers": config.num_layers,
        "num_heads": C // config.head_dim,
        "hidden_ratio": config.intermediate_size / C,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,  # RWKV's documents are separated by token 0
        "eos_token_id": 0,
        "pad_token_id": None,  # with one, PyTorch keeps its row of the embedding from learning
        "torch_dtype": str(dtype),
    }


def _fields(config: RWKV6Config, dtype: np.dtype) -> dict[str, Any]:
    """Source: flash-linear-attention ``fla/models/rwkv6/configuration_rwkv6.py``."""
    # FLA calls the rank of the decay that of a gate
    ranks = {"proj_low_rank_dim": config.proj_low_rank_dim, "gate_low_rank_dim": config.decay_low_rank_dim}
    return {**common_fields(config, dtype, 6), "expand_k": 1.0, "expand_v": 1.0, **ranks}


FLA6 = ParamMap(
    "FLA's RWKV-6",
    RWKV6,
    mark=LAYER + r"attn\.bonus",
    layer=LAYER,
    places=PLACES,
    prefix=PREFIX,
    parts={"attn.x_bias": tuple(f"attn.x_bias[{i}]" for i in range(5))},
    fields=_fields,
)
