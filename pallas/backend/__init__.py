"""How kernels are called: through jax-triton, through Pallas, or in an interpreter."""
