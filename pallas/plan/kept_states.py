"""Where the forward keeps the states that enter chunks: in memory that gradients take over, where the shapes allow it.

A chunk's state [V, K] has as many numbers as ``n = V / 16`` token arrays [B, T, H, K] have in its 16 tokens, and the backward reads a chunk's state before it
writes the chunk's gradients. So row v is kept at token ``v // n`` of the chunk in array ``v % n``, and the backward writes gradients over them. At B8 T4096 H64
D64 forward + backward need 1.97 in place of 3.04 GB. A jitted step does it in place; where someone else still needs the arrays (a backward called by itself,
outside jit), JAX copies them first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .chunked import CHUNK, LaunchTable, has_half, launch_options, store_dtype, tile


@triton.jit
def state_rows(states, ov, H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, ARRAYS: tl.constexpr):
    """Pointers to the rows ``ov`` of a state, from where its chunk begins: in token arrays, or in the one array [.., V, K]."""
    if ARRAYS == 0:
        return states[0] + ov * K
    else:
        row = tl.arange(
            0, BV
        )  # ov, in a form that shows the compiler that all rows of a thread lie in one array
        array = row % ARRAYS
        first = tl.where(
            array < 2, tl.where(array < 1, states[0], states[1]), tl.where(array < 3, states[2], states[3])
        )
        return first + (row // ARRAYS) * (H * K)


@triton.jit
def gradients_over_states(states, gradients, TAKEN: tl.constexpr):
    """Where to write four gradients: the first ``TAKEN`` in the memory of states, through the inputs' pointers (run/triton.py)."""
    first, second, third, fourth = gradients
    if TAKEN > 0:
        first = states[0]
    if TAKEN > 1:
        second = states[1]
    if TAKEN > 2:
        third = states[2]
    if TAKEN > 3:
        fourth = states[3]
    return first, second, third, fourth


def result(wanted: bool, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape of a kernel's result: one element where it will hold nothing."""
    return jax.ShapeDtypeStruct(shape if wanted else (1,), dtype)


@dataclasses.dataclass(frozen=True)
class KeptStates:
    """``arrays`` (1, 2 or 4) token arrays of ``dtype``, the first ``taken`` of which become gradients; 0 arrays: one of chunks, heads and states [V, K]."""

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

    def shapes(self, r: jax.Array, V: int, chunks: tuple[int, int], keep: bool) -> list[jax.ShapeDtypeStruct]:
        """The forward kernel's four results."""
        _, _, H, K = r.shape
        shape = r.shape if self.arrays else (*chunks, H, V, K)
        return [result(keep and i < self.count, shape, self.dtype) for i in range(4)]

    def operands(self, states: Sequence[jax.Array]) -> list[jax.Array]:
        """The backward kernel's four arguments, with the leading axis of its results."""
        return [x[None] for x in states] + [jnp.zeros(1, self.dtype)] * (4 - self.count)

    def aliases(self, first: int, outputs: Sequence[int]) -> dict[int, int]:
        """For `launch`: the kernel's arguments from ``first`` on become its ``outputs``."""
        return {first + i: outputs[i] for i in range(self.taken)}


def keep_states(table: LaunchTable, x: Any, gradients: Sequence[str]) -> KeptStates:
    """How to keep the states of a recurrence with inputs ``x`` (arrays, or their shapes).

    ``gradients`` name the inputs whose gradients may take the memory over, in the order of the backward kernel. They do
    where rows have whole chunks, one program holds all values, at most 64, and those gradients have the shape and dtype
    of kept states.
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
