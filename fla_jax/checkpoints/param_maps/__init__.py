"""Namings of tensors. `NAMINGS` is open: append another one, and files in it load."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..tensors import quoted
from .fla6 import FLA6
from .fla7 import FLA7
from .official6 import OFFICIAL6
from .official7 import OFFICIAL7
from .param_map import Family, ParamMap, Size, TensorRef, Transform

__all__ = [
    "FLA6",
    "FLA7",
    "NAMINGS",
    "OFFICIAL6",
    "OFFICIAL7",
    "Family",
    "ParamMap",
    "Size",
    "TensorRef",
    "Transform",
]

NAMINGS: list[ParamMap] = [OFFICIAL6, OFFICIAL7, FLA6, FLA7]

# Looked for first: variants that share many names with the known ones.
_REFUSED = {
    r"\.ffn\.s_emb": "RWKV-7a (deep embedding)",
    r"\.att\.qkv|\.qkv\.|k_emb": "RWKV-7b",
    r"\.time_mix_": "RWKV-4 or RWKV-5",
    r"\.attn\.q_proj\.": "a hybrid with softmax attention",
}


def identify(names: Collection[str]) -> ParamMap:
    """The naming of a file with these names; that which was added last, where several are.

    Raises:
        ValueError: none that is known.
    """
    known = ", ".join(param_map.name for param_map in NAMINGS)
    for pattern, variant in _REFUSED.items():
        for name in names:
            if re.search(pattern, name):
                raise ValueError(f"{quoted(name)} belongs to {variant}; known are {known}")
    for param_map in reversed(NAMINGS):
        if param_map.detect(names):
            return param_map
    raise ValueError(f"its names are not those of a known model; known are {known}")
