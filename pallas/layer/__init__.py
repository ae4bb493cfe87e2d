"""Triton kernels of a layer around its recurrence, and their host code."""
