"""Calls of kernels inside JAX programs: Triton's, Pallas', and their interpreters."""
