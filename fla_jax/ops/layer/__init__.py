"""The pieces of a layer around its recurrence, as ops: plain JAX, and kernels that do each in one pass."""
