"""Tiles of tokens in memory: what all Triton kernels load and store with."""

import triton
import triton.language as tl


@triton.jit
def where_or_zero(x, keep):
    """``x`` where ``keep``, else zero, in x's dtype."""
    return tl.where(keep, x, 0.0).to(x.dtype)


@triton.jit
def load_tokens(ptr, offsets, mask, even: tl.constexpr):
    """A tile in the dtype of memory; ``even`` says that no element of any tile is missing."""
    if even:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def store_tokens(ptr, offsets, x, mask, even: tl.constexpr):
    """Stores a tile in the dtype of memory."""
    if even:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gradient(ptr, offsets, x, factor, mask, c: tl.constexpr):
    """`store_tokens` of ``x``, in the form for any decay times ``factor``."""
    if c.unsafe_gate:
        x *= factor
    store_tokens(ptr, offsets, x, mask, c.unmasked)
