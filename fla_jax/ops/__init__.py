"""The RWKV-6 and RWKV-7 recurrences, and the operations around them in a layer, as differentiable JAX ops.

`OPS` has every op by name.
"""

from ..core.implementation import Implementation
from ..core.op import Op
from .layer import keys, norm_mix, readout
from .rwkv6 import api as rwkv6
from .rwkv6.api import chunk_rwkv6, fused_recurrent_rwkv6
from .rwkv7 import api as rwkv7
from .rwkv7.api import chunk_rwkv7, fused_recurrent_rwkv7

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        *(rwkv7.CHUNK, rwkv7.RECURRENT, rwkv6.CHUNK, rwkv6.RECURRENT),
        *(keys.KEYS, readout.RWKV7, readout.RWKV6, norm_mix.NORM_SHIFT_MIX),
    )
}

__all__ = [
    "OPS",
    "Implementation",
    "Op",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
]
