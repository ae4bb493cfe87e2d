"""The only file of the nets that names internals: adapt it where they move, and nothing else.

The rest of the nets calls public functions and describes calls by their arguments.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from harness import variants
from jax.sharding import AbstractDevice, AbstractMesh


def lowering_for(capability: int) -> contextlib.AbstractContextManager[Any]:
    """Context in which kernels are compiled for a GPU that is not here."""
    from fla_jax.core.gpu import lowering_for

    return lowering_for(capability)


@contextlib.contextmanager
def abstract_gpu(capability: int) -> Iterator[None]:
    """`lowering_for`, with the device that Pallas looks for."""
    known = {"platform": "gpu"} if "platform" in AbstractDevice.__dataclass_fields__ else {}
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, **known)
    mesh = AbstractMesh((), (), abstract_device=device)
    with lowering_for(capability), jax.sharding.use_abstract_mesh(mesh):
        yield


def cannot_compile() -> str | None:
    """Why Triton kernels cannot be lowered for CUDA in this process, None where they can."""
    from fla_jax.pallas.backend import triton

    if triton.INTERPRET:
        return "Triton's interpreter is on (TRITON_INTERPRET)"
    with lowering_for(90):
        refused = triton.why_not("gpu")
        return refused and refused.reason


def patch_interpreter() -> None:
    """Makes Triton's interpreter faster."""
    from harness import interpreter

    interpreter.patch_once()


def decode_step(model: Any, implementation: str) -> Callable[..., Any]:
    """``(weights, tokens, state, active) -> (logits, state)`` of one decoded token."""
    from fla_jax.generation.steps import FastStep, ModelStep

    return ModelStep(model) if implementation == "model" else FastStep(model, implementation)


def decode_weights(model: Any, params: Any, int8_group: int | None = None) -> Any:
    """The weights that `decode_step` reads (but "model", which reads the parameters)."""
    from fla_jax.generation.decode_weights import prepare_decode_weights

    return prepare_decode_weights(model, params, int8_group)


def sample(sampling: Any, logits: jax.Array, keys: jax.Array, implementation: str) -> Any:
    """Tokens chosen from logits [B, V], and their log probabilities."""
    from fla_jax.generation.sampling import TokenCounts, sample

    none = TokenCounts.none(*logits.shape)
    return sample(sampling.arrays(logits.shape[1]), logits, none, keys, implementation)


# What forces a kernel variant that the inputs of an interpreter (float32, small) would not select: module and
# attribute, and its new value.
_RWKV6, _RWKV7 = variants.RWKV6, variants.RWKV7
_MIX = "fla_jax.pallas.layer.norm_shift_mix_variants"
FORCED: dict[str, tuple[tuple[str, Any], ...]] = {
    "bf16 kernels": ((_RWKV7 + ":select", variants._of_bf16),),
    "key-major tiles": ((_RWKV6 + ":select", variants._key_major), (_RWKV7 + ":select", variants._key_major)),
    "no wgmma": ((_RWKV7 + ":select", variants._without_wgmma),),
    "tf32x3 products": (("fla_jax.pallas.common.chunk_plan:INTERPRET", False),),
    "splits of 16 tokens": (("fla_jax.pallas.common.chunk_plan:MIN_SPLIT_LEN", 16),),
    "recurrent gradients by chunks": (
        ("fla_jax.pallas.rwkv7.recurrent_host:_by_chunks", lambda call, x: True),
    ),
    "mix: token blocks of 4": ((_MIX + ":MIN_BLOCK_LEN", 4),),
    "mix: channel tiles of 128": (
        (_MIX + ":VARIANTS", lambda old: [x for x in old if not x.is_whole]),
        (_MIX + ":TILES", lambda old: {n: x._replace(channels=min(x.channels, 128)) for n, x in old.items()}),
    ),
    "mix: two tokens at once": (
        (_MIX + ":WHOLE", lambda old: {n: x._replace(tokens=2) for n, x in old.items()}),
    ),
    "decode: 8 programs": (("fla_jax.pallas.decode.projections_host:PROGRAMS", 8),),
}
_COMPUTED = (
    "bf16 kernels",
    "key-major tiles",
    "no wgmma",
    "mix: channel tiles of 128",
    "mix: two tokens at once",
)  # functions of the old value


@contextlib.contextmanager
def forced(*names: str) -> Iterator[None]:
    """Context in which calls take other kernels than they would select; nothing traced elsewhere is used."""
    jax.clear_caches()
    with contextlib.ExitStack() as undo:
        for name in names:
            for place, value in FORCED[name]:
                module, attribute = place.split(":")
                module = importlib.import_module(module)
                old = getattr(module, attribute)
                new = value(old) if name in _COMPUTED and callable(value) else value
                setattr(module, attribute, new)
                undo.callback(setattr, module, attribute, old)
        yield
    jax.clear_caches()
