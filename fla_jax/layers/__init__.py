"""Flax linen layers of RWKV-6 and RWKV-7."""
