"""Where the forward keeps the states that enter chunks: in memory that gradients take over, where the shapes
allow it.

A chunk's state [V, K] has as many numbers as ``n = V / 16`` token arrays [B, T, H, K] have in its 16 tokens,
and the backward reads a chunk's state before it writes the chunk's gradients. So row v is kept at token
``v // n`` of the chunk in array ``v % n``, and the backward writes gradients over them. At B8 T4096 H64 D64
forward + backward need 1.97 in place of 3.04 GB. A jitted step does it in place; where someone else still
needs the arrays (a backward called by itself, outside jit), JAX copies them first.

Kernels have four parameters for such arrays, states0_ to states3_; device/kept_states.py finds a state there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .chunked import CHUNK, LaunchTable, has_half, launch_options, store_dtype
from .shapes import result, tile

NAMES = ("states0_", "states1_", "states2_", "states3_")  # the kernels' parameters


@dataclasses.dataclass(frozen=True)
class KeptStates:
    """How states are kept.

    Attributes:
        arrays: number of token arrays, 1, 2 or 4; 0 for one array of chunks, heads and states [V, K].
        taken: how many of them, the first ones, become gradients.
        dtype: of the arrays.
    """

    arrays: int
    taken: int
    dtype: Any

    @property
    def axes(self) -> dict[str, str]:
        """Names and axes of the arrays, as an op's ``kept_axes`` wants them."""
        if not self.arrays:
            return {"states": "b chunk h v k"}
        return {f"states{i}": "b t h k" for i in range(self.arrays)}

    @property
    def count(self) -> int:
        """How many arrays there are in all."""
        return max(1, self.arrays)

    def shapes(
        self, r: jax.Array, V: int, chunks: tuple[int, int], keep: bool
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Four results of the forward kernel."""
        _, _, H, K = r.shape
        shape = r.shape if self.arrays else (*chunks, H, V, K)
        return {name: result(keep and i < self.count, shape, self.dtype) for i, name in enumerate(NAMES)}

    def kept(self, made: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Those of the forward kernel's results that the backward reads, as `axes` names them."""
        return dict(zip(self.axes, (made[name] for name in NAMES)))

    def operands(self, kept: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Four arguments of the backward kernel, with the leading axis of its results."""
        states = [kept[name][None] for name in self.axes]
        return dict(zip(NAMES, states + [jnp.zeros(1, self.dtype)] * (4 - self.count)))

    def aliases(self, gradients: Sequence[str]) -> dict[str, str]:
        """For `launch`: the arguments that become the kernel's results ``gradients``."""
        return dict(zip(NAMES[: self.taken], gradients))


def keep_states(table: LaunchTable, x: Any, gradients: Sequence[str]) -> KeptStates:
    """How to keep the states of a recurrence with inputs ``x`` (arrays, or their shapes).

    ``gradients`` name the inputs whose gradients may take the memory over, in the order of the backward
    kernel. They do where rows have whole chunks, one program holds all values, at most 64, and those
    gradients have the shape and dtype of kept states.
    """
    (_, T, _, K), V, half = x.r.shape, x.v.shape[-1], has_half(x)
    dtype = jnp.dtype(store_dtype(half))
    arrays = tile(V) // CHUNK
    results = [getattr(x, name) for name in gradients]
    fit = [result.shape == x.r.shape and result.dtype == dtype for result in results[:arrays]]
    taken = (fit + [False]).index(False)
    most = min(4 * CHUNK, launch_options(table, "backward", K, half)[0])
    fits = taken > 0 and x.cu_seqlens is None and T % CHUNK == 0 and most >= V
    return KeptStates(arrays, taken, dtype) if fits else KeptStates(0, 0, dtype)
