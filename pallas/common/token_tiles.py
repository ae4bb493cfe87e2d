"""Loads and stores of tiles of tokens."""

import triton
import triton.language as tl


@triton.jit
def where_or_zero(x, mask):
    """``x`` where ``mask``, else zero, in x's dtype."""
    return tl.where(mask, x, 0.0).to(x.dtype)


@triton.jit
def select_row(mask, x, y, length: tl.constexpr):
    """Pointers ``x`` where ``mask``, else ``y``, of two axes, all to starts of rows of ``length`` elements.

    Triton 3.8 and newer loses the alignment of selected pointers; without `tl.multiple_of` it would load and
    store single elements, and not in the background.
    """
    row_bytes: tl.constexpr = length * x.dtype.scalar.element_ty.primitive_bitwidth // 8
    alignment: tl.constexpr = (row_bytes | 16) & -(row_bytes | 16)
    return tl.multiple_of(tl.where(mask, x, y), (alignment, alignment))


@triton.jit
def load_tokens(ptr, offsets, mask, unmasked: tl.constexpr):
    """A tile as stored. ``unmasked``: every element of every tile exists."""
    if unmasked:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def store_tokens(ptr, offsets, x, mask, unmasked: tl.constexpr):
    """Stores a tile in the dtype of the array."""
    if unmasked:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gradient(ptr, offsets, x, factor, mask, c: tl.constexpr):
    """`store_tokens` of ``x``, under an unsafe gate times ``factor``."""
    if c.unsafe_gate:
        x *= factor
    store_tokens(ptr, offsets, x, mask, c.unmasked)
