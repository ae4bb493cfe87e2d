"""Triton kernels of a decoded token: products, the step of a head, the choice of a token; their host code."""
