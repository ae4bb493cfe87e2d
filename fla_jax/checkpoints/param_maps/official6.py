"""RWKV-LM's own names of RWKV-6.

Source: RWKV-LM ``RWKV-v5/src/model.py``; PyPI rwkv ``model.py``.
"""

from __future__ import annotations

from ...models.config import RWKVConfig
from .families import RWKV6
from .param_map import SAME, UNIT_AXES, ParamMap, TensorRef, dense, norm

PREFIX = r"(_forward_module\.)?(model\.)?"
LAYER = r"blocks\.(0|[1-9][0-9]{0,5})\."


def check_state(shape: tuple[int, ...], config: RWKVConfig) -> None:
    """The check of tuned initial states."""
    want = config.hidden_size // config.head_dim, config.head_dim, config.head_dim
    if shape != want:
        raise ValueError(f"must have shape [H, V, K] = {list(want)}, got {list(shape)}")


_ATT, _FFN = "blocks.{}.att.", "blocks.{}.ffn."
# PyPI rwkv takes the number of heads from time_faaaa if it has met a time_maa before
_VECTORS = ("time_maa_x", "time_maa_w", "time_maa_k", "time_maa_v", "time_maa_r", "time_maa_g", "time_decay")
_MATRICES = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2", "time_faaaa")

PLACES = {
    "emb/embedding": TensorRef("emb.weight"),
    **norm("ln0", "blocks.0.ln0"),
    **norm("blocks/ln1", "blocks.{}.ln1"),
    **norm("blocks/ln2", "blocks.{}.ln2"),
    **{f"blocks/att/{name}": TensorRef(_ATT + name, UNIT_AXES) for name in _VECTORS},
    **{f"blocks/att/{name}": TensorRef(_ATT + name, SAME) for name in _MATRICES},
    **dense("blocks/att/receptance", _ATT + "receptance"),
    **dense("blocks/att/key", _ATT + "key"),
    **dense("blocks/att/value", _ATT + "value"),
    **dense("blocks/att/gate", _ATT + "gate"),
    **dense("blocks/att/output", _ATT + "output"),
    **norm("blocks/att/ln_x", _ATT + "ln_x"),
    "blocks/ffn/time_maa_k": TensorRef(_FFN + "time_maa_k", UNIT_AXES),
    "blocks/ffn/time_maa_r": TensorRef(_FFN + "time_maa_r", UNIT_AXES),
    **dense("blocks/ffn/key", _FFN + "key"),
    **dense("blocks/ffn/receptance", _FFN + "receptance"),
    **dense("blocks/ffn/value", _FFN + "value"),
    **norm("ln_out", "ln_out"),
    **dense("head", "head"),
}

OFFICIAL6 = ParamMap(
    "RWKV-LM's RWKV-6",
    RWKV6,
    mark=LAYER + r"att\.time_maa_x",
    layer=LAYER,
    places=PLACES,
    extras={LAYER + r"att\.time_state": check_state},
    prefix=PREFIX,
)
