"""Triton kernels of the fused pieces around a recurrence."""
