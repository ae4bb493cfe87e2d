"""Norm, token shift and mixes in one pass: `fla_jax.ops.layer.norm_shift_mix`."""
