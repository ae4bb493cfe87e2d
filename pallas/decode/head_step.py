"""Functions and records shared by the kernels that do one step of a head.

The states of all layers, [layers, B, H, K, V], are updated in place, and so are the token shifts
[layers, B, C]: when these kernels run, the previous tokens of this layer's attention and of the feed-forward
of the layer below have been read. Inactive batch elements keep their states. N, the channels of a head, is a
power of two.
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Compile-time facts of a step.

    Attributes:
        B: batch elements.
        H: heads.
        N: channels of a head.
        width: channels of the projections of a token.
        norm_eps: added to the variance of a head's output.
    """

    B: int
    H: int
    N: int
    width: int
    norm_eps: float


class StepState(NamedTuple):
    """The stacked states: wkv [layers, B, H, N, N], the token shifts [layers, B, C]."""

    wkv: jax.Array
    att_shift: jax.Array
    ffn_shift: jax.Array


class StepInputs(NamedTuple):
    """Results of a layer's projections for a token.

    Attributes:
        projections: [B, width] float32.
        first_projections: of layer 0, in layers that mix its values; else None.
        second: results of the second low-rank stages, [.., B, C]; None: RWKV-6's kernel computes its own.
        att_shift: [B, C], new shift of this layer's attention.
        ffn_shift: [B, C], new shift of the feed-forward of the layer below.
        active: [B] int32.
        layer: ``2 layer + 3``, an odd number, which the compiler does not specialise.
    """

    projections: jax.Array
    first_projections: jax.Array | None
    second: jax.Array | None
    att_shift: jax.Array
    ffn_shift: jax.Array
    active: jax.Array
    layer: int


class StepOut(NamedTuple):
    """y [B, C], the input of the output projection, and the states, in place."""

    y: jax.Array
    state: StepState


@triton.jit
def group_norm(o, scale, bias, N: tl.constexpr, EPS: tl.constexpr):
    """Group norm of a head's output [N]."""
    o -= tl.sum(o, 0) / N
    return o * tl.rsqrt(tl.sum(o * o, 0) / N + EPS) * scale + bias


@triton.jit
def store_shifts(state, att_shift, ffn_shift, layer, here, B: tl.constexpr, C: tl.constexpr):
    """Stores the new shifts, of [B, C] at ``here``: this layer's, and the feed-forward's of the layer below.

    Called at a kernel's end: loads do not move across a store or a branch.
    """
    at = (layer - 3) // 2
    tl.store(state.att_shift + at * (B * C) + here, att_shift)
    tl.store(state.ffn_shift + (at - 1) * (B * C) + here, ffn_shift, mask=(here >= 0) & (at > 0))


@triton.jit
def load_vector(ptr, channel):
    """Values as float32."""
    return tl.load(ptr + channel).to(tl.float32)
