"""RWKV-6 and RWKV-7 language models."""
