"""What type checkers know of the public functions: checked by mypy (pyproject.toml), never run."""

from typing import assert_type

import jax

from fla_jax.ops import chunk_rwkv6, chunk_rwkv7, fused_recurrent_rwkv6, fused_recurrent_rwkv7


def states(x: jax.Array, ask: bool) -> None:
    """With ``output_final_state=True`` the state is an array, else perhaps None."""
    assert_type(chunk_rwkv7(x, x, x, x, x, x, output_final_state=True), tuple[jax.Array, jax.Array])
    assert_type(chunk_rwkv7(x, x, x, x, x, x), tuple[jax.Array, jax.Array | None])
    assert_type(chunk_rwkv7(x, x, x, x, x, x, output_final_state=ask), tuple[jax.Array, jax.Array | None])
    assert_type(
        chunk_rwkv6(x, x, x, x, x, output_final_state=True, chunk_size=16), tuple[jax.Array, jax.Array]
    )
    one_token = fused_recurrent_rwkv7(x, x, x, x, x, x, output_final_state=True, initial_state=x)
    assert_type(one_token, tuple[jax.Array, jax.Array])
    assert_type(fused_recurrent_rwkv6(x, x, x, x, x, scale=2.0), tuple[jax.Array, jax.Array | None])
