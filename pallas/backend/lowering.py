"""Lowers `triton_call`: compiles the kernel to PTX and writes jaxlib's custom call for it.

The custom call is jaxlib's ``triton_kernel_call_ffi``, which XLA records into CUDA graphs and fuses with
slices of its operands. Compiled kernels are stored in Triton's cache (``TRITON_CACHE_DIR``,
``~/.triton/cache``), so that a kernel is compiled once for all processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jaxlib
import triton
from jax.extend.core import Primitive
from jax.extend.mlir.ir import Value
from jax.interpreters import mlir
from jaxlib import gpu_triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from .call import TritonCall
from .dtypes import TRITON_DTYPES
from .types import Kernel, Signature
from .versions import plugin_missing

# private and undocumented names of other packages: no module imports any but these, and only this one does
PRIVATE_NAMES = (
    "jaxlib.gpu_triton",  # what triton_kernel_call_ffi reads
    "triton._C.libtriton.ir",  # the compiler's context
    "triton.backends.compiler.GPUTarget",
    "triton.compiler.ASTSource",
    "triton.compiler.make_backend",
)
# variables that make Triton and LLVM compile differently begin so
_ENVIRONMENT = ("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "ALLOW_", "DISABLE_")
Path: TypeAlias = tuple[int, ...]  # of a leaf: a parameter's position, then a field's, ...
Leaf: TypeAlias = str | int | None
_ALIGNMENT = 16  # bytes, of every array that XLA allocates

compiled_in_this_process: dict[str, bytes] = {}
try:
    _kernel_type = gpu_triton.TritonKernel
except AttributeError as error:
    raise ImportError(plugin_missing()) from error

triton_call_p = Primitive("fla_jax_triton_call")
triton_call_p.multiple_results = True


@triton_call_p.def_abstract_eval
def _abstract_eval(*_: jax.core.AbstractValue, call: TritonCall) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(shape.shape, shape.dtype) for shape in call.shapes]


def _lower(
    ctx: mlir.LoweringRuleContext, *arrays: Value, call: TritonCall
) -> Sequence[Value | Sequence[Value]]:
    """The custom call, from the cache or compiled."""
    signature = call.parameters(map(pointer_type, ctx.avals_in), map(pointer_type, ctx.avals_out))
    key = _key(call, signature)
    opaque = compiled_in_this_process.get(key) or _read_cache(key)
    if opaque is None:
        opaque = zlib.compress(_compile(call, signature).to_proto(call.kernel.__name__, b""))
        _write_cache(key, opaque)
    compiled_in_this_process[key] = opaque
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi", api_version=4, operand_output_aliases=dict(call.aliases)
    )
    return rule(ctx, *arrays, opaque=opaque)


mlir.register_lowering(triton_call_p, _lower, platform="cuda")


def pointer_type(array: jax.core.AbstractValue) -> str:
    """Triton's type of a pointer to an array."""
    assert isinstance(array, jax.core.ShapedArray)
    return "*" + TRITON_DTYPES[array.dtype]


def _leaves(tree: Signature, path: Path) -> Iterator[tuple[Path, Leaf]]:
    """Leaves with their paths of indices, None included, as Triton addresses parts of a parameter."""
    if isinstance(tree, tuple):
        for i, part in enumerate(tree):
            yield from _leaves(part, (*path, i))
    else:
        yield path, tree


def _triton_type(leaf: Leaf) -> str:
    """Triton's type of a leaf; None and 1 are compiled in, as Triton does by default."""
    if isinstance(leaf, str):
        return leaf
    return "constexpr" if leaf is None or leaf == 1 else _int_type(leaf)


def _int_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def triton_source(
    kernel: Kernel, signature: Mapping[str, Signature], constants: Mapping[str, Hashable]
) -> tuple[ASTSource, list[int | None]]:
    """Triton's input, and the arguments of the compiled kernel: an int, or None for an array.

    Args:
        kernel: a `triton.jit` function.
        signature: its parameters but the constants: trees of pointer types (``"*bf16"``), ints and None.
        constants: the rest.
    """
    names = kernel.arg_names
    leaves = [*_leaves(tuple(signature.values()), ())]
    fixed: dict[Path, Hashable] = {path: leaf for path, leaf in leaves if leaf is None or leaf == 1}
    types = jax.tree.map(_triton_type, dict(signature), is_leaf=lambda leaf: leaf is None)
    source = ASTSource(
        fn=kernel,
        signature=types | {name: "constexpr" for name in constants},
        constexprs=fixed | {(names.index(name),): value for name, value in constants.items()},
        attrs={path: [["tt.divisibility", _ALIGNMENT]] for path, leaf in leaves if isinstance(leaf, str)},
    )
    return source, [None if isinstance(leaf, str) else leaf for path, leaf in leaves if path not in fixed]


def _compile(call: TritonCall, signature: dict[str, Signature]) -> gpu_triton.TritonKernelCall:
    """jaxlib's description of the compiled kernel and its arguments."""
    source, arguments = triton_source(call.kernel, signature, dict(call.constants))
    described = [
        gpu_triton.create_array_parameter(0, _ALIGNMENT)
        if argument is None
        else gpu_triton.create_scalar_parameter(argument, _int_type(argument))
        for argument in arguments
    ]
    return gpu_triton.TritonKernelCall(_compile_to_ptx(source, call), *call.grid, described)


def _compile_to_ptx(source: ASTSource, call: TritonCall) -> gpu_triton.TritonKernel:
    """Triton's stages up to PTX, which jaxlib assembles on the GPU's machine."""
    target = _target(call.capability)
    backend = make_backend(target)
    options = backend.parse_options(triton_options(call))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, codegen, modules, context)
    first = str(module)
    metadata: dict[str, str | int] = {}
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, source.language)
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    return _kernel_type(
        metadata["name"], call.launch.num_warps, 1, metadata["shared"], module, first, call.capability
    )


def triton_options(call: TritonCall) -> dict[str, int | bool | None]:
    """Triton's compile options. Values that are defaults in some versions of Triton only are set."""
    return {
        "num_warps": call.launch.num_warps,
        "num_stages": call.launch.num_stages,
        "maxnreg": call.launch.max_registers or None,
        "enable_fp_fusion": True,
        # else the newest PTX that Triton's own ptxas reads, and JAX's may be older
        "ptx_version": 88 if call.capability >= 100 else 87,
    }


def _target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


def _key(call: TritonCall, signature: dict[str, Signature]) -> str:
    """A digest of everything that the compiled kernel and its call depend on."""
    versions = [package.__version__ for package in (triton, jax, jaxlib)]
    environment = sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT))
    described = repr(
        (
            versions,
            environment,
            triton_options(call),
            call.capability,
            call.kernel.cache_key,
            signature,
            call.constants,
            call.grid,
        )
    )
    return hashlib.sha256(described.encode()).hexdigest()


def _cache_file(key: str) -> pathlib.Path:
    return pathlib.Path(triton.knobs.cache.dir, key, "fla-jax-call")


def _read_cache(key: str) -> bytes | None:
    """The call that `_write_cache` has stored under ``key``, or None."""
    try:
        opaque = _cache_file(key).read_bytes()
        zlib.decompress(opaque)
        return opaque
    except (OSError, zlib.error):  # never stored, or an incomplete file
        return None


def _write_cache(key: str, opaque: bytes) -> None:
    """Stores a compiled call for other processes."""
    path = _cache_file(key)
    with contextlib.suppress(OSError):  # no folder to write to: the next process compiles it again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(opaque)
        os.replace(file.name, path)  # at once, so that other processes never read a part
