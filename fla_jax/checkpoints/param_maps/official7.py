"""RWKV-LM's own names of RWKV-7.

Source: RWKV-LM ``RWKV-v7/train_temp/src/model.py``; PyPI rwkv ``model.py``.
"""

from __future__ import annotations

from .families import RWKV7
from .official6 import LAYER, PREFIX, check_state
from .param_map import SAME, UNIT_AXES, ParamMap, TensorRef, any_shape, dense, norm

_ATT, _FFN = "blocks.{}.att.", "blocks.{}.ffn."
_VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")
_MATRICES = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2", "r_k")

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
    **dense("blocks/att/output", _ATT + "output"),
    **norm("blocks/att/ln_x", _ATT + "ln_x"),
    "blocks/ffn/x_k": TensorRef(_FFN + "x_k", UNIT_AXES),
    **dense("blocks/ffn/key", _FFN + "key"),
    **dense("blocks/ffn/value", _FFN + "value"),
    **norm("ln_out", "ln_out"),
    **dense("head", "head"),
}

OFFICIAL7 = ParamMap(
    "RWKV-LM's RWKV-7",
    RWKV7,
    mark=LAYER + r"att\.r_k",
    layer=LAYER,
    places=PLACES,
    # layer 0's are in official files, and nothing reads them
    extras={r"blocks\.0\.att\.v[012]": any_shape, LAYER + r"att\.time_state": check_state},
    prefix=PREFIX,
)
