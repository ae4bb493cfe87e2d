"""The one place that forces kernel variants which an interpreter's inputs (float32, small) do not select."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from . import cases

RWKV6, RWKV7 = "fla_jax.pallas.rwkv6.chunk_host", "fla_jax.pallas.rwkv7.chunk_host"
GEMV_HOST = "fla_jax.pallas.decode.gemv_host"
MIX, MIX_HOST = "fla_jax.pallas.layer.norm_shift_mix_variants", "fla_jax.pallas.layer.norm_shift_mix_host"


def _of_bf16(select: Any) -> Any:
    """The variants of bfloat16 inputs, key-major tiles apart."""

    def selected(table: Any, key: Any) -> Any:
        found = select(table, dataclasses.replace(key, bf16_dots=True, all_bf16=True, w_float16=False))
        return _named(table, "fused") if found.name == "fused_wgmma" else found

    return selected


def _key_major(select: Any) -> Any:
    """Fused backwards with key-major tiles, whatever the size of a head."""

    def selected(table: Any, key: Any) -> Any:
        found = select(table, key)
        return _named(table, "fused_wgmma") if found.name.startswith("fused") else found

    return selected


def _without_wgmma(select: Any) -> Any:
    """The variants of a GPU without products of a warp group."""

    def selected(table: Any, key: Any) -> Any:
        return select(table, dataclasses.replace(key, gpu=dataclasses.replace(key.gpu, wgmma=False)))

    return selected


def _named(table: Any, name: str) -> Any:
    return next(variant for variant in table if variant.name == name)


# name: (module, attribute, its value or a function of the old one)
FORCED: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "bf16 dots": ((RWKV7, "select", _of_bf16),),
    "key-major": ((RWKV6, "select", _key_major), (RWKV7, "select", _key_major)),
    "no wgmma": ((RWKV7, "select", _without_wgmma),),
    "tf32x3": (("fla_jax.pallas.common.chunk_plan", "INTERPRET", lambda old: False),),
    "splits": (("fla_jax.pallas.common.chunk_plan", "MIN_SPLIT_LEN", lambda old: 16),),
    "splits of 160": (("fla_jax.pallas.common.chunk_plan", "MIN_SPLIT_LEN", lambda old: 160),),
    "tail of 4 chunks": tuple(
        (f"fla_jax.pallas.{module}", "TAIL", lambda old: type(old)(4))
        for module in ("common.forgetting", "rwkv6.chunk_state", "rwkv7.chunk_state")
    ),
    "no splits": (
        ("fla_jax.pallas.common.chunk_plan", "MAX_SPLIT_PROGRAMS", lambda old: {}),
        (RWKV7, "MAX_FORWARD_PROGRAMS", lambda old: {}),
    ),
    "recurrent gradients by chunks": (
        ("fla_jax.pallas.rwkv7.scan_host", "has_chunk_gradients", lambda old: lambda ctx, x: True),
        ("fla_jax.pallas.rwkv7.recurrent_host", "has_chunk_gradients", lambda old: lambda ctx, x: True),
    ),
    "mix: token blocks of 4": ((MIX, "MIN_BLOCK_LEN", lambda old: 4),),
    "mix: tiles of 128 channels": (
        (MIX_HOST, "VARIANTS", lambda old: [one for one in old if not one.is_whole]),
        (MIX, "TILES", lambda old: {n: x._replace(channels=min(x.channels, 128)) for n, x in old.items()}),
    ),
    "mix: 2 tokens": ((MIX, "WHOLE", lambda old: {n: x._replace(tokens=2) for n, x in old.items()}),),
    "mix: 4 tokens": ((MIX, "WHOLE", lambda old: {n: x._replace(tokens=4) for n, x in old.items()}),),
    "decode: two tiles": ((GEMV_HOST, "WARPS", lambda old: 96), (GEMV_HOST, "PROGRAMS", lambda old: 8)),
    "decode: many tiles": tuple((GEMV_HOST, name, lambda old: 8) for name in ("WARPS", "PROGRAMS")),
    "decode: split-K": (("fla_jax.pallas.decode.gemm_host", "MIN_SPLIT_CHANNELS", lambda old: 16),),
}


@contextlib.contextmanager
def forced(*names: str) -> Iterator[None]:
    """Context in which calls take these variants; nothing traced elsewhere is used, nor the reverse."""
    if not names:
        yield
        return
    with cases.fresh_traces(), pytest.MonkeyPatch.context() as patch:
        for name in names:
            for module, attribute, value in FORCED[name]:
                owner = importlib.import_module(module)
                patch.setattr(owner, attribute, value(vars(owner)[attribute]))
        yield


def num_splits(case: cases.Case) -> int:
    """How often kernels split the tokens of a batch entry."""
    from fla_jax.pallas.common import chunk_plan

    return chunk_plan.num_splits_of(case.context())
