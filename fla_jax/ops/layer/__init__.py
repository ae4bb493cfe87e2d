"""The pieces of a layer around its recurrence, as ops: plain JAX, and kernels that do each in one pass."""

from .decay import rwkv6_decay
from .keys import rwkv7_keys
from .norm_mix import norm_shift_mix
from .readout import rwkv6_readout, rwkv7_readout
from .squared_relu import squared_relu

__all__ = ["norm_shift_mix", "rwkv6_decay", "rwkv6_readout", "rwkv7_keys", "rwkv7_readout", "squared_relu"]
