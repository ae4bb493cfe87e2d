"""RWKV-7 token by token, in Pallas: kernels, and the launcher that the op loads."""
