"""Where states that enter chunks, or gradients of states that leave them, are kept: in memory that gradients
of tokens take over, where the shapes allow it.

A chunk's state [V, K] has as many numbers as ``n = V / 16`` token arrays [B, T, H, K] have in its 16 tokens,
and the backward reads a chunk's state before it writes the chunk's gradients. So row v is kept at token
``v // n`` of the chunk in array ``v % n``, and the backward writes gradients over them. At B8 T4096 H64 D64
forward + backward need 1.96 in place of 3.04 GB. A jitted step does it in place; where someone else still
needs the arrays (a backward called by itself, outside jit), JAX copies them first.

Where RWKV-7's backward takes two kernels only the gradients of states lie there; states lie apart.

Large heads of 16 bits keep a state for every two chunks, where it is as large as ``n = V / 32`` token arrays
are in their 32 tokens.

Kernels have four parameters for such arrays, states0_ to states3_ or dstates0_ to dstates3_;
common/state_buffers.py finds a state there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .chunk_host import CHUNK, ChunkPlan, has_bf16_dots, store_dtype
from .shapes import result, tile


@dataclasses.dataclass(frozen=True)
class StateBuffers:
    """How states are kept.

    Attributes:
        arrays: number of token arrays, 1, 2 or 4; 0 for one array of states [V, K] by chunks and heads.
        taken: how many of them, the first ones, become gradients.
        every: for how many chunks there is one state.
        dtype: of the arrays.
        name: of the kernels' parameters, before their number.
    """

    num_buffers: int
    num_aliased: int
    chunks_per_state: int
    dtype: Any
    name: str = "states"

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' parameters."""
        return tuple(f"{self.name}{i}_" for i in range(4))

    @property
    def axes(self) -> dict[str, str]:
        """Names and axes of the arrays, as an op's ``kept_axes`` wants them."""
        if not self.num_buffers:
            return {"states": "b state h v k"}
        return {f"states{i}": "b t h k" for i in range(self.num_buffers)}

    @property
    def count(self) -> int:
        """How many arrays there are in all."""
        return max(1, self.num_buffers)

    def shapes(
        self, r: jax.Array, V: int, plan: ChunkPlan, keep: bool = True
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Four results of the kernel that makes them."""
        _, _, H, K = r.shape
        shape = r.shape if self.num_buffers else (*plan.state_shape(self.chunks_per_state), H, V, K)
        return {name: result(keep and i < self.count, shape, self.dtype) for i, name in enumerate(self.names)}

    def residuals(self, made: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Those of the forward kernel's results that the backward reads, as `axes` names them."""
        return dict(zip(self.axes, (made[name] for name in self.names)))

    def operands(self, residuals: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Four arguments of the backward kernel, with the leading axis of its results."""
        buffers = [residuals[name][None] for name in self.axes]
        return dict(zip(self.names, buffers + [jnp.zeros(1, self.dtype)] * (4 - self.count)))

    def aliases(self, gradients: Sequence[str]) -> dict[str, str]:
        """For `launch`: the arguments that become the kernel's results ``gradients``."""
        return dict(zip(self.names[: self.num_aliased], gradients))


def state_buffers(
    x: Any, gradients: Sequence[str], most: int, chunks_per_state: int = 1, name: str = "states"
) -> StateBuffers:
    """How to keep the states of a recurrence with inputs ``x`` (arrays, or their shapes), one for ``every``
    chunks.

    ``gradients`` name the inputs whose gradients may take the memory over, in the order of the backward
    kernel. They do where rows have whole chunks (by ``every``), the program that writes them holds all
    values, of which it holds ``most``, four arrays are enough for them, and those gradients have the shape
    and dtype of kept states.
    """
    T, V, tokens = x.r.shape[1], x.v.shape[-1], chunks_per_state * CHUNK
    dtype = jnp.dtype(store_dtype(has_bf16_dots(x)))
    num_buffers = tile(V) // tokens
    results = [getattr(x, name) for name in gradients]
    fit = [result.shape == x.r.shape and result.dtype == dtype for result in results[:num_buffers]]
    num_aliased = (fit + [False]).index(False)
    fits = num_aliased > 0 and x.cu_seqlens is None and T % tokens == 0 and min(4 * tokens, most) >= V
    return StateBuffers(num_buffers if fits else 0, num_aliased if fits else 0, chunks_per_state, dtype, name)
