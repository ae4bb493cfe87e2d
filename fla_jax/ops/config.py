"""The static part of one op call: what a custom_vjp core may depend on besides arrays."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class OpConfig:
    """Hashable settings of one call, resolved from the public arguments.

    Attributes:
        scale: factor on the output.
        chunk_size: tokens per chunk, or None for the implementation's own choice.
        lower_bound: promise that every log decay is at least this, or None.
        compute_name: name of the dtype of states and arithmetic, ``"float32"`` or ``"float64"``.
        implementation: ``"reference"``, ``"xla"``, ...: a key of the op's table.
        keep: whether a backward will follow, for which the forward keeps states.
    """

    scale: float
    chunk_size: int | None
    lower_bound: float | None
    compute_name: str
    implementation: str = ""
    keep: bool = True

    @property
    def compute(self) -> jnp.dtype:
        """The dtype of states and arithmetic."""
        return jnp.dtype(self.compute_name)
