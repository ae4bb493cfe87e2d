"""RWKV-6 and RWKV-7 language models."""

from ..layers.state import RWKVState
from .block import RWKV6Block, RWKV7Block
from .causal_lm import RWKV6ForCausalLM, RWKV7ForCausalLM
from .config import RWKV6Config, RWKV7Config, RWKVConfig
from .stacking import initial_params, stack_layers, unstack_layers

__all__ = [
    "RWKV6Block",
    "RWKV6Config",
    "RWKV6ForCausalLM",
    "RWKV7Block",
    "RWKV7Config",
    "RWKV7ForCausalLM",
    "RWKVConfig",
    "RWKVState",
    "initial_params",
    "stack_layers",
    "unstack_layers",
]
