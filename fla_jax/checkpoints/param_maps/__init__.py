"""The names of tensors in files. `PARAM_MAPS` is an open list: append a map, and its files load and save."""

from __future__ import annotations

import re
from collections.abc import Collection

from ...models import Family
from ..tensors import quoted
from .fla import FLA6, FLA7
from .official import OFFICIAL6, OFFICIAL7
from .param_map import ParamMap, TensorRef, Transform

__all__ = [
    "FLA6",
    "FLA7",
    "OFFICIAL6",
    "OFFICIAL7",
    "PARAM_MAPS",
    "ParamMap",
    "TensorRef",
    "Transform",
]

PARAM_MAPS: list[ParamMap] = [OFFICIAL6, OFFICIAL7, FLA6, FLA7]

# Variants that share many names with the known ones, refused before a map is looked for.
_REFUSED = {
    r"\.ffn\.s_emb": "RWKV-7a (deep embedding)",
    r"\.att\.qkv|\.qkv\.|k_emb": "RWKV-7b",
    r"\.time_mix_": "RWKV-4 or RWKV-5",
    r"\.attn\.q_proj\.": "a hybrid with softmax attention",
}


def identify(names: Collection[str]) -> ParamMap:
    """The map of a file with these names, the last of several.

    Raises:
        ValueError: no map has these names.
    """
    known = ", ".join(param_map.name for param_map in PARAM_MAPS)
    for pattern, variant in _REFUSED.items():
        for name in names:
            if re.search(pattern, name):
                raise ValueError(f"{quoted(name)} belongs to {variant}; known are {known}")
    for param_map in reversed(PARAM_MAPS):
        if param_map.detect(names):
            return param_map
    raise ValueError(f"its names are not those of a known model; known are {known}")


def map_for(family: Family, scheme: str) -> ParamMap:
    """The map with which models of a family are written in a scheme, the last of several.

    Raises:
        ValueError: no map fits.
    """
    for param_map in reversed(PARAM_MAPS):
        if param_map.family is family and param_map.scheme == scheme:
            return param_map
    raise ValueError(f"PARAM_MAPS must have a map of {family.name} of the scheme {scheme!r}")
