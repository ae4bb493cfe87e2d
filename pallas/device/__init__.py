"""Device functions that kernels share."""
