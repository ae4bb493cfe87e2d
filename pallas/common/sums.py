"""Several sums at once: a sum over several warps is a barrier, and so is a tuple of sums."""

import triton
import triton.language as tl


@triton.jit
def extended(items, item):
    """The tuple ``items`` with ``item`` appended."""
    return items + (item,)


@triton.jit
def add_two(a0, a1, b0, b1):
    """Two sums at once."""
    return a0 + b0, a1 + b1


@triton.jit
def add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    """Four sums at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add_eight(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    """Eight sums at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def sums(arrays):
    """The sums over the first axis of one, two, four or eight arrays, as a tuple."""
    if len(arrays) == 1:
        return (tl.sum(arrays[0], 0),)
    elif len(arrays) == 2:
        return tl.reduce(arrays, 0, add_two)
    elif len(arrays) == 4:
        return tl.reduce(arrays, 0, add_four)
    else:
        return tl.reduce(arrays, 0, add_eight)
