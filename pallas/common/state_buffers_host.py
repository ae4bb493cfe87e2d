"""Where chunk states, or gradients of chunk states, are stored: in memory that token gradients overwrite,
where shapes allow.

A state [V, K] has as many numbers as ``n = V / 16`` token arrays [B, T, H, K] have in the 16 tokens of its
chunk, and the backward reads a chunk's state before it writes the chunk's gradients. So value v of the state
is stored at token ``v // n`` of the chunk in array ``v % n``, and the backward writes gradients over it:
forward and backward at B8 T4096 H64 D64 take 1.96 GB, not 3.04. In a jitted step this happens in place; JAX
copies arrays that are still needed elsewhere.

Where two chunks share a state, it is as large as ``n = V / 32`` token arrays in their 32 tokens. Where
RWKV-7's backward takes two kernels, only gradients of states are stored so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.types import Recurrence
from .chunk_plan import CHUNK, ChunkPlan
from .shapes import tile


@dataclasses.dataclass(frozen=True)
class StateBuffers:
    """How chunk states are stored.

    Attributes:
        num_buffers: number of token-shaped arrays, 1, 2 or 4; 0 for one array of states [V, K].
        num_aliased: how many of them, the first ones, become gradients.
        chunks_per_state: chunks that share one state.
        dtype: of the arrays.
    """

    num_buffers: int
    num_aliased: int
    chunks_per_state: int
    dtype: DTypeLike

    @property
    def axes(self) -> dict[str, str]:
        """Names of the arrays as residuals, and their axes."""
        if not self.num_buffers:
            return {"states": "b state h v k"}
        return {f"states{i}": "b t h k" for i in range(self.num_buffers)}

    def shapes(self, r: jax.Array, V: int, plan: ChunkPlan) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays, as outputs of the kernel that stores states."""
        _, _, H, K = r.shape
        shape = r.shape if self.num_buffers else (*plan.states(self.chunks_per_state), H, V, K)
        return (jax.ShapeDtypeStruct(shape, self.dtype),) * max(1, self.num_buffers)

    def residuals(self, states: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The arrays as residuals, by the names of `axes`."""
        return dict(zip(self.axes, states, strict=True))

    def operands(self, residuals: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The arrays for the backward kernel, with the axis of value blocks that its outputs have."""
        return tuple(residuals[name][None] for name in self.axes)

    def aliases(self, path: str, gradients: Sequence[str]) -> dict[str, str]:
        """The outputs ``gradients`` that overwrite the first arrays of ``path``, for `triton_call`."""
        return {f"{path}.{i}": name for i, name in enumerate(gradients[: self.num_aliased])}


def state_buffers(
    x: Recurrence, gradients: Sequence[str], max_values: int, dtype: DTypeLike, chunks_per_state: int = 1
) -> StateBuffers:
    """Where to store the states of a recurrence.

    Args:
        x: inputs, or their shapes.
        gradients: inputs whose gradients may overwrite states, in the order of the backward kernel's outputs.
        max_values: values of a program of that kernel. It and the forward's must have all values of a head.
        dtype: of stored states.
        chunks_per_state: chunks that share one state. Sequences must have whole groups of them.
    """
    T, V, tokens = x.r.shape[1], x.v.shape[-1], chunks_per_state * CHUNK
    dtype = jnp.dtype(dtype)
    num_buffers = tile(V) // tokens
    arrays = [getattr(x, name) for name in gradients]
    fit = [array.shape == x.r.shape and array.dtype == dtype for array in arrays[:num_buffers]]
    num_aliased = (fit + [False]).index(False)
    fits = num_aliased > 0 and x.cu_seqlens is None and T % tokens == 0 and min(4 * tokens, max_values) >= V
    return StateBuffers(num_buffers if fits else 0, num_aliased if fits else 0, chunks_per_state, dtype)
