"""Triton kernels of the pieces of a layer around its recurrence, and what launches them."""
