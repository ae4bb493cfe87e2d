"""How `prefill` cuts prompts into chunks, so that few programs are compiled and little padding is read.

A prefill chunk is read by one call of the model for several prompts at once. Its lengths come from
`chunk_sizes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

# Costs of a chunk besides its tokens, in tokens of the whole batch. On an accelerator a layer takes at least
# 0.1 ms to launch, in which a layer of width 1024 reads a thousand tokens (other widths: by C^-2); loading
# the weights takes as long as 128 tokens, on a CPU as long as 32.
_OVERHEAD, _LEAST_OVERHEAD, _MOST_OVERHEAD, _CPU_OVERHEAD = 2**30, 128, 4096, 32
# The largest chunk, in tokens of the whole batch: a layer's intermediate arrays, about 25 float32 numbers a
# token and channel, take at most a sixteenth of an accelerator's memory. A CPU gains nothing from larger
# chunks.
_LARGEST, _CPU_LARGEST, _MEMORY_SHARE, _BYTES = 2**14, 512, 1 / 16, 100
_OP_CHUNK = 16  # tokens in a chunk of the ops
_GROWTH = 1.15  # of the cost from one chunk size to the next
# From so many tokens on, a chunk without padding has its own program, which masks nothing and is 6 % faster.
UNMASKED_TOKENS = 2048


def grouped(
    lengths: np.ndarray, sizes: Callable[[int], Sequence[int]], overhead: float
) -> list[np.ndarray] | None:
    """Groups of prompts of similar lengths, all of one size, a power of two.

    The size minimises the tokens that are read, with ``overhead`` tokens for each chunk.

    Args:
        lengths: [B], tokens of each prompt.
        sizes: the chunk sizes for a number of prompts.
        overhead: cost of a chunk besides its tokens, in tokens of the whole batch.

    Returns:
        The indices of each group's prompts, or None where groups save less than a fifth.
    """
    falling = np.argsort(-lengths, kind="stable")

    def cost(size: int) -> float:
        longest = lengths[falling[::size]]
        plans = [plan(int(length), sizes(size)) for length in longest]
        return sum(len(chunks) * overhead + size * sum(chunks) for chunks in plans)

    batch = len(lengths)
    smaller = [1 << n for n in range((batch - 1).bit_length())]
    best = min(smaller, key=cost, default=batch)
    if best == batch or cost(best) > 0.8 * cost(batch):
        return None
    return [falling[start : start + best] for start in range(0, batch, best)]


@functools.lru_cache
def chunk_sizes(hidden_size: int, batch: int, device: jax.Device) -> tuple[int, ...]:
    """Lengths of prefill chunks, rising. Each that is needed is one compiled program.

    All are multiples of the ops' chunks and include every power of two from the smallest on.

    Args:
        hidden_size: C, width of the model.
        batch: number of prompts.
        device: its platform and the size of its memory decide, not the memory that is free.
    """
    largest = _CPU_LARGEST if device.platform == "cpu" else _LARGEST
    memory = None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
    if memory:
        largest = min(largest, int(memory * _MEMORY_SHARE / (_BYTES * hidden_size)))
    overhead = chunk_overhead(hidden_size, device) / batch
    last = _power_of_two(largest // batch)
    sizes = [min(_power_of_two(int((_GROWTH - 1) * overhead)), last)]
    while sizes[-1] < last:
        size = sizes[-1]
        low, high = overhead + size, overhead + 2 * size
        steps = math.ceil(math.log(high / low, _GROWTH))
        between = (low * (high / low) ** (i / steps) - overhead for i in range(1, steps))
        sizes += sorted({2 * size, *(math.ceil(n / _OP_CHUNK) * _OP_CHUNK for n in between)})
    return tuple(sizes)


def chunk_overhead(hidden_size: int, device: jax.Device) -> float:
    """Cost of a chunk besides its tokens, in tokens of the whole batch."""
    if device.platform == "cpu":
        return float(_CPU_OVERHEAD)
    return min(max(_OVERHEAD / hidden_size**2, _LEAST_OVERHEAD), _MOST_OVERHEAD)


def _power_of_two(n: int) -> int:
    """The largest up to ``n``, and at least an op's chunk."""
    return max(_OP_CHUNK, 1 << max(n, 1).bit_length() - 1)


def plan(length: int, sizes: Sequence[int]) -> list[int]:
    """The chunks that ``length`` tokens are read in. The last one may be longer than its tokens."""
    whole, rest = divmod(length, sizes[-1])
    return [sizes[-1]] * whole + [size for size in sizes if size >= rest > 0][:1]
