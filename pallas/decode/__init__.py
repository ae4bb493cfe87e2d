"""Triton kernels of a decoded token: products of few rows with what is around them, a step of a head."""
