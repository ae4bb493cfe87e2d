"""One decoded token of a layer, in a few large steps, which `fla_jax.generation` puts together.

Every step has a definition in plain JAX (`plain`) and a kernel with the same arguments
(`fla_jax.pallas.decode.host`). They are not `Op`s: nothing here is differentiated, mapped or sharded, and the
recurrent state is written in place.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.decode_layers import Layer6 as Layer6
from ...core.decode_layers import Layer7 as Layer7
from ...core.decode_layers import Matrix as Matrix
from ...core.decode_layers import Quantisation as Quantisation
from ...core.decode_layers import quantised as quantised
from ...core.implementation import Candidate, Registry, Unsupported
from ...pallas.backend import triton
from . import plain


class DecodeContext(NamedTuple):
    """The static facts of decoding with a model."""

    platform: str
    hidden_size: int
    head_dim: int
    intermediate_size: int


class DecodeSteps:
    """The steps of a decoded token in plain JAX; other implementations derive from it."""

    project = staticmethod(plain.project)
    rwkv7_step = staticmethod(plain.rwkv7_step)
    rwkv6_mix = staticmethod(plain.rwkv6_mix)
    rwkv6_step = staticmethod(plain.rwkv6_step)


def _triton() -> type[DecodeSteps]:
    from ...pallas.decode import host

    class Triton(DecodeSteps):
        project = staticmethod(host.project)
        rwkv7_step = staticmethod(host.rwkv7_step)
        rwkv6_mix = staticmethod(host.rwkv6_mix)
        rwkv6_step = staticmethod(host.rwkv6_step)

    return Triton


def _plain() -> type[DecodeSteps]:
    return DecodeSteps


def _supports(ctx: DecodeContext) -> Unsupported | None:
    if ctx.hidden_size % 64 or ctx.intermediate_size % 32:
        return Unsupported("it takes widths that are multiples of 64, and of 32 in the feed-forward")
    if max(ctx.hidden_size, ctx.intermediate_size) > 2**15:
        return Unsupported("it takes widths of up to 32768")
    if ctx.head_dim not in (16, 32, 64, 128):
        return Unsupported(f"it takes heads of 16, 32, 64 or 128 channels, got {ctx.head_dim}")
    return None


def _triton_supports(ctx: DecodeContext) -> Unsupported | None:
    return triton.why_not(ctx.platform) or _supports(ctx)


STEPS: Registry[Candidate[DecodeContext, type[DecodeSteps]]] = Registry(
    "decode", [Candidate("triton", _triton, _triton_supports), Candidate("plain", _plain, _supports)]
)
