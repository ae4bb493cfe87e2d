"""The fused pieces of RWKV's layers around the recurrences, as differentiable JAX ops."""

from .norm_mix import norm_shift_mix

__all__ = ["norm_shift_mix"]
