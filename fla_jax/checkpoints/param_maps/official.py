"""RWKV-LM's names of RWKV-6 and RWKV-7.

Source: RWKV-LM ``RWKV-v5/src/model.py``, ``RWKV-v7/train_temp/src/model.py``; PyPI rwkv ``model.py``.
"""

from __future__ import annotations

from ...models import FAMILIES
from .param_map import (
    SAME,
    UNIT_AXES,
    ParamMap,
    TensorRef,
    Transform,
    any_shape,
    check_time_state,
    dense,
    model_refs,
)

PREFIX = r"(_forward_module\.)?(model\.)?"
LAYER = r"blocks\.(0|[1-9][0-9]{0,5})\."
TIME_STATE = "blocks.{}.att.time_state"  # RWKV-PEFT's and PyPI rwkv's
NAMES = {
    "emb": "emb",
    "ln0": "blocks.0.ln0",
    "ln1": "blocks.{}.ln1",
    "ln2": "blocks.{}.ln2",
    "ln_x": "blocks.{}.att.ln_x",
    "ln_out": "ln_out",
    "head": "head",
}


def _layer_refs(part: str, names: str, transform: Transform) -> dict[str, TensorRef]:
    """Parameters of a layer's ``"att"`` or ``"ffn"`` that files have under the same names."""
    return {
        f"blocks/{part}/{name}": TensorRef(f"blocks.{{}}.{part}.{name}", transform) for name in names.split()
    }


OFFICIAL6 = ParamMap(
    "RWKV-LM's RWKV-6",
    "official",
    FAMILIES["rwkv6"],
    mark=LAYER + r"att\.time_maa_x",
    layer=LAYER,
    refs=model_refs(
        NAMES,
        # PyPI rwkv takes the number of heads from time_faaaa, after a time_maa
        att=_layer_refs(
            "att",
            "time_maa_x time_maa_w time_maa_k time_maa_v time_maa_r time_maa_g time_decay",
            UNIT_AXES,
        )
        | _layer_refs("att", "time_maa_w1 time_maa_w2 time_decay_w1 time_decay_w2 time_faaaa", SAME)
        | dense("blocks/att", "blocks.{}.att", "receptance key value gate output"),
        ffn=_layer_refs("ffn", "time_maa_k time_maa_r", UNIT_AXES)
        | dense("blocks/ffn", "blocks.{}.ffn", "key receptance value"),
    ),
    extras={LAYER + r"att\.time_state": check_time_state},
    time_state=TIME_STATE,
    prefix=PREFIX,
)
OFFICIAL7 = ParamMap(
    "RWKV-LM's RWKV-7",
    "official",
    FAMILIES["rwkv7"],
    mark=LAYER + r"att\.r_k",
    layer=LAYER,
    refs=model_refs(
        NAMES,
        att=_layer_refs("att", "x_r x_w x_k x_v x_a x_g w0 a0 v0 k_k k_a", UNIT_AXES)
        | _layer_refs("att", "w1 w2 a1 a2 v1 v2 g1 g2 r_k", SAME)
        | dense("blocks/att", "blocks.{}.att", "receptance key value output"),
        ffn=_layer_refs("ffn", "x_k", UNIT_AXES) | dense("blocks/ffn", "blocks.{}.ffn", "key value"),
    ),
    # official files have layer 0's v0, v1, v2, which no program reads
    extras={r"blocks\.0\.att\.v[012]": any_shape, LAYER + r"att\.time_state": check_time_state},
    time_state=TIME_STATE,
    prefix=PREFIX,
)
