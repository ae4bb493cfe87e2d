"""RWKV-6 and RWKV-7 language models."""

from ..layers.state import RWKVState
from .causal_lm import RWKV6Block, RWKV6ForCausalLM, RWKV7Block, RWKV7ForCausalLM
from .checkpoint import load_checkpoint, load_extras, save_checkpoint
from .config import RWKV6Config, RWKV7Config
from .pth import read_pth, write_pth
from .stacking import stack_layers, unstack_layers

__all__ = [
    "RWKV6Block",
    "RWKV6Config",
    "RWKV6ForCausalLM",
    "RWKV7Block",
    "RWKV7Config",
    "RWKV7ForCausalLM",
    "RWKVState",
    "load_checkpoint",
    "load_extras",
    "read_pth",
    "save_checkpoint",
    "stack_layers",
    "unstack_layers",
    "write_pth",
]
