"""RWKV-6 and RWKV-7, and which parameter tells which size of their configurations."""

from __future__ import annotations

from ...models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
from .param_map import Family, Size

RWKV6 = Family(
    "RWKV-6",
    RWKV6Config,
    RWKV6ForCausalLM,
    {
        "head_dim": Size("blocks/att/time_faaaa", 1),
        "intermediate_size": Size("blocks/ffn/key/kernel", 1),
        "proj_low_rank_dim": Size("blocks/att/time_maa_w1", 1, parts=5),
        "decay_low_rank_dim": Size("blocks/att/time_decay_w1", 1),
    },
)
RWKV7 = Family(
    "RWKV-7",
    RWKV7Config,
    RWKV7ForCausalLM,
    {
        "head_dim": Size("blocks/att/r_k", 1),
        "intermediate_size": Size("blocks/ffn/key/kernel", 1),
        "decay_low_rank_dim": Size("blocks/att/w1", 1),
        "a_low_rank_dim": Size("blocks/att/a1", 1),
        "v_low_rank_dim": Size("blocks/att/v1", 1, layer=1),  # layer 0 has none
        "gate_low_rank_dim": Size("blocks/att/g1", 1),
    },
)
