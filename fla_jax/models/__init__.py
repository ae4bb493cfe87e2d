"""Language models, their configurations, and the table of their families."""

from ..layers.state import RWKVState
from .block import RWKV6Block, RWKV7Block, RWKVBlock
from .causal_lm import RWKVForCausalLM
from .config import RWKVConfig
from .embedding import head_kernel
from .families import FAMILIES, Family, Size, family_of
from .rwkv6 import RWKV6Config, RWKV6ForCausalLM
from .rwkv7 import RWKV7Config, RWKV7ForCausalLM
from .stacking import initial_params, stack_layers, unstack_layers

__all__ = [
    "FAMILIES",
    "Family",
    "RWKV6Block",
    "RWKV6Config",
    "RWKV6ForCausalLM",
    "RWKV7Block",
    "RWKV7Config",
    "RWKV7ForCausalLM",
    "RWKVBlock",
    "RWKVConfig",
    "RWKVForCausalLM",
    "RWKVState",
    "Size",
    "family_of",
    "head_kernel",
    "initial_params",
    "stack_layers",
    "unstack_layers",
]
