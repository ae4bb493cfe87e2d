"""Ops of a layer around its recurrence: in plain JAX, and as kernels that each make one pass."""

from .decay import rwkv6_decay
from .keys import rwkv7_keys
from .norm_mix import norm_shift_mix
from .readout import rwkv6_readout, rwkv7_readout
from .squared_relu import squared_relu

__all__ = ["norm_shift_mix", "rwkv6_decay", "rwkv6_readout", "rwkv7_keys", "rwkv7_readout", "squared_relu"]
