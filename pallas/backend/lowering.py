"""How jax-triton 0.3 hands our kernels to XLA: compiled once for all processes, and so that XLA records them.

jax-triton 0.3 compiles every kernel in every process. Triton's own cache (``~/.triton/cache``, or
``TRITON_CACHE_DIR``) keeps what it made.

It calls a kernel by a name that XLA cannot record into CUDA graphs: the host looks up some ten kilobytes for
every kernel of every step, which was a third of the time of a token decoded for one row. jaxlib has a name
that XLA records, and fuses with slices of the call's operands, which jax-triton 0.4 takes. We take it, too.

A kernel's constant ``REGISTERS`` says how many a thread may have at most; jax-triton has no such option. (Its
0.4 compiles with as many as wanted, which is right, and slower.)

Calls of other kernels than ours go the way that jax-triton has for them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import zlib
from pathlib import Path
from typing import Any

import jax
import jax_triton
import jaxlib
import triton
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax_triton import triton_lib
from jaxlib import gpu_triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import get_cache_manager

_PLAIN, _RECORDED = "triton_kernel_call", "triton_kernel_call_ffi"  # as jaxlib has them
_FILE = "jax-triton-call"


def lowered(ours: str, ctx: Any, *arrays: Any, **parameters: Any) -> Any:
    """jax-triton's rule for calling a kernel on NVIDIA GPUs, but for those that are called by our name."""
    if parameters["custom_call_target_name"] != ours:
        return _theirs(ctx, *arrays, **parameters)
    parameters["custom_call_target_name"] = _PLAIN
    key = _key(ctx, parameters)
    call = _kept(key)
    if call is None:
        operation = _theirs(ctx, *arrays, **parameters)[0].owner
        call = ir.StringAttr(operation.attributes["backend_config"]).value_bytes
        operation.operation.erase()
        _keep(key, call)
    aliases = dict(parameters["input_output_aliases"])
    rule = jax.ffi.ffi_lowering(_RECORDED, api_version=4, operand_output_aliases=aliases)
    return rule(ctx, *arrays, opaque=call)


def _theirs(ctx: Any, *arrays: Any, **parameters: Any) -> Any:
    compiler = functools.partial(_compiler, parameters.get("MAX_REGISTERS"))
    return triton_lib.triton_kernel_call_lowering(compiler, ctx, *arrays, **parameters)


def _compiler(registers: int | None, device: int, capability: int) -> Any:
    """jax-triton's way to the compiler, with at most so many registers for a thread."""
    backend = triton_lib.get_cuda_backend(device, capability)
    if registers:
        parse = backend.parse_options
        backend.parse_options = lambda options: parse(options | {"maxnreg": registers})
    return backend


def _key(ctx: Any, parameters: dict[str, Any]) -> str:
    """All that a compiled kernel and its call are made from: the source with that of all it calls, what it is
    called with, and who compiles it.
    """
    versions = [package.__version__ for package in (triton, jax_triton, jax, jaxlib)]
    versions += sorted(get_cache_invalidating_env_vars().items())
    # as jax-triton finds it out, where nobody has said it; the hash has the assembler's version, too
    capability = parameters["compute_capability"] or gpu_triton.get_compute_capability(0)
    versions += [triton_lib.get_cuda_backend(0, capability).hash()]
    shapes = [(x.shape, x.dtype.name) for x in (*ctx.avals_in, *ctx.avals_out)]
    rest = sorted((name, value) for name, value in parameters.items() if name not in ("fn", "out_shapes"))
    described = repr((versions, parameters["fn"].cache_key, shapes, rest))
    return hashlib.sha256(described.encode()).hexdigest()


def _kept(key: str) -> bytes | None:
    """What `_keep` has put away, if it can be read."""
    try:
        path = get_cache_manager(key).get_file(_FILE)
        call = Path(path).read_bytes() if path else None
        if call is not None:
            zlib.decompress(call)
        return call
    except (OSError, RuntimeError, zlib.error):  # no place to write to, or half a file
        return None


def _keep(key: str, call: bytes) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the next process compiles it again
        get_cache_manager(key).put(call, _FILE, binary=True)


def install(ours: str) -> None:
    """Makes `lowered` the rule, for calls by that name."""
    rule = functools.partial(lowered, ours)
    mlir.register_lowering(triton_lib.triton_kernel_call_p, rule, platform="cuda")
