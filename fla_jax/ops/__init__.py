"""The RWKV-6 and RWKV-7 recurrences as differentiable JAX ops."""

from ..core.op import Implementation, Op
from .rwkv6.api import chunk_rwkv6, fused_recurrent_rwkv6
from .rwkv7.api import chunk_rwkv7, fused_recurrent_rwkv7

__all__ = [
    "Implementation",
    "Op",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
]
