"""RWKV-6 by chunks, in Triton: forward, backward, and the launcher that the op loads."""
