"""Triton kernels of a decoded token: products of few rows with what is around them, and the step of a head."""
