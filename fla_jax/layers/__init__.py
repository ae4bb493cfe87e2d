"""Flax linen layers of RWKV-6 and RWKV-7."""

from .attention import Attention
from .base import Layer
from .feed_forward import FeedForward
from .fp8 import FP8_SCALES
from .lora import LoRA
from .rwkv6 import RWKV6Attention, RWKV6FeedForward
from .rwkv7 import RWKV7Attention, RWKV7FeedForward
from .shift import token_shift
from .state import RWKVState

__all__ = [
    "FP8_SCALES",
    "Attention",
    "FeedForward",
    "Layer",
    "LoRA",
    "RWKV6Attention",
    "RWKV6FeedForward",
    "RWKV7Attention",
    "RWKV7FeedForward",
    "RWKVState",
    "token_shift",
]
