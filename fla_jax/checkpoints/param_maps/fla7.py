"""flash-linear-attention's names of RWKV-7.

Source: flash-linear-attention ``fla/models/rwkv7``, ``fla/layers/rwkv7.py``, ``utils/convert_from_rwkv7.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...models import RWKV7Config
from .families import RWKV7
from .fla6 import LAYER, PREFIX, common_fields
from .param_map import SAME, TRANSPOSED, UNIT_AXES, VECTOR, ParamMap, TensorRef, any_shape, dense, norm

_ATT, _FFN = "model.layers.{}.attn.", "model.layers.{}.ffn."

PLACES = {
    "emb/embedding": TensorRef("model.embeddings.weight"),
    **norm("ln0", "model.layers.0.pre_norm"),
    **norm("blocks/ln1", "model.layers.{}.attn_norm"),
    **norm("blocks/ln2", "model.layers.{}.ffn_norm"),
    **{f"blocks/att/x_{name}": TensorRef(f"{_ATT}x_{name}", UNIT_AXES) for name in "rwkvag"},
    **{f"blocks/att/{name}0": TensorRef(f"{_ATT}{name}_lora.lora.2.bias", VECTOR) for name in "wav"},
    **{f"blocks/att/{name}1": TensorRef(f"{_ATT}{name}_lora.lora.0.weight", TRANSPOSED) for name in "wavg"},
    **{f"blocks/att/{name}2": TensorRef(f"{_ATT}{name}_lora.lora.2.weight", TRANSPOSED) for name in "wavg"},
    "blocks/att/k_k": TensorRef(_ATT + "k_k", VECTOR),
    "blocks/att/k_a": TensorRef(_ATT + "k_a", VECTOR),
    "blocks/att/r_k": TensorRef(_ATT + "r_k", SAME),
    **dense("blocks/att/receptance", _ATT + "r_proj"),
    **dense("blocks/att/key", _ATT + "k_proj"),
    **dense("blocks/att/value", _ATT + "v_proj"),
    **dense("blocks/att/output", _ATT + "o_proj"),
    **norm("blocks/att/ln_x", _ATT + "g_norm"),
    "blocks/ffn/x_k": TensorRef(_FFN + "x_k", VECTOR),
    **dense("blocks/ffn/key", _FFN + "key"),
    **dense("blocks/ffn/value", _FFN + "value"),
    **norm("ln_out", "model.norm"),
    **dense("head", "lm_head"),
}


def _fields(config: RWKV7Config, dtype: np.dtype) -> dict[str, Any]:
    """Source: flash-linear-attention ``fla/models/rwkv7/configuration_rwkv7.py``."""
    ranks = {name: getattr(config, name) for name in RWKV7.sizes if name.endswith("_low_rank_dim")}
    widths = {"head_dim": config.head_dim, "value_dim": [config.hidden_size] * config.num_layers}
    return {**common_fields(config, dtype, 7), **widths, **ranks}


FLA7 = ParamMap(
    "FLA's RWKV-7",
    RWKV7,
    mark=LAYER + r"attn\.r_k",
    layer=LAYER,
    places=PLACES,
    extras={r"model\.layers\.0\.attn\.v_lora\..*": any_shape},  # nothing reads layer 0's
    prefix=PREFIX,
    parts={"attn.x_x": tuple(f"attn.x_{name}" for name in "rwkvag")},  # in files of before
    fields=_fields,
)
