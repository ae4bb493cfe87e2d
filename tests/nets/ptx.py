"""PTX without what names, files and numbers of parameters say, and what ptxas makes of it."""

from __future__ import annotations

import hashlib
import pathlib
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.mlir import ir


class Kernel(NamedTuple):
    """One launch in a program.

    Attributes:
        name: of the kernel, for messages.
        ptx: its code.
        shared: bytes of shared memory of a block.
        warps: of a block.
        grid: number of blocks.
        aliased: number of results that take over the memory of operands.
    """

    name: str
    ptx: str
    shared: int
    warps: int
    grid: tuple[int, ...]
    aliased: int


def operations(op: Any) -> Iterator[Any]:
    """All operations in ``op``, outer before inner ones."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner
                yield from operations(inner)


def kernels(module: Any) -> list[Kernel]:
    """The Triton launches of a lowered program, in its order."""
    found = []
    for op in operations(module.operation):
        if op.operation.name != "stablehlo.custom_call":
            continue
        if "triton_kernel_call" not in str(op.attributes["call_target_name"]):
            continue
        attributes = op.attributes
        packed = (  # jax-triton 0.3 keeps the description in one, 0.4 in the other
            ir.DictAttr(attributes["mhlo.backend_config"])["opaque"]
            if "mhlo.backend_config" in attributes
            else attributes["backend_config"]
        )
        aliased = [attributes[name] for name in attributes if name == "output_operand_aliases"]
        found.append(_kernel(zlib.decompress(ir.StringAttr(packed).value_bytes), sum(map(len, aliased))))
    return found


def _fields(data: bytes) -> dict[int, Any]:
    """The fields of a protobuf message: numbers, or bytes; of repeated ones the last."""
    found, i = {}, 0

    def varint() -> int:
        nonlocal i
        value = shift = 0
        while True:
            byte = data[i]
            i += 1
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value

    while i < len(data):
        key = varint()
        if key & 7 == 0:
            found[key >> 3] = varint()
        elif key & 7 == 2:
            size = varint()
            found[key >> 3] = data[i : i + size]
            i += size
        else:
            size = {1: 8, 5: 4}[key & 7]
            found[key >> 3] = data[i : i + size]
            i += size
    return found


def _kernel(description: bytes, aliased: int) -> Kernel:
    """jaxlib's TritonAnyKernelCall (jaxlib/gpu/triton.proto)."""
    call = _fields(_fields(description)[1])
    kernel = _fields(call[1])
    grid = tuple(call.get(i, 1) for i in (2, 3, 4))
    return Kernel(kernel[1].decode(), kernel[4].decode(), kernel.get(3, 0), kernel.get(2, 1), grid, aliased)


# what names a value or a place: registers by kind, labels, parameters, the strings of libdevice
_NAMED = re.compile(r"%[a-z]+\d+|\$L__\w+|\w+_param_\d+|_\$_str\w*")


def normalised(kernel: Kernel) -> str:
    """The instructions alone; registers, labels and parameters are numbered by first use, so that parameters
    may be renamed, exchanged, or dropped where nothing reads them.
    """
    text = kernel.ptx.replace(kernel.name, "KERNEL")
    text = text.split("\t.file\t")[0].split("\n\t.section")[0]
    kinds = dict(re.findall(r"\.param (.*?) (?:\.ptr.*? )?(KERNEL_param_\d+)", text))
    kinds = {name: kind for kind, name in kinds.items()}
    header = re.findall(r"^\.(?:target|extern|reqntid|maxnreg|minnctapersm|maxntid).*", text, re.M)
    body = text[text.index("\n{") :]
    lines, loaded = [], {}
    for line in body.splitlines():
        line = re.sub(r"\s*//.*", "", line).strip()
        if not line or line.startswith((".loc", ".reg", ".pragma", "$L__tmp", "$L__func", "$L__BB0_0:")):
            continue
        load = re.match(r"ld\.param\.\w+\s+(%\w+), \[(KERNEL_param_\d+)(\+\d+)?\];", line)
        if load:
            loaded[load[1]] = load[2] + (load[3] or "")
        else:
            lines.append(re.sub(r"\s+", " ", line))
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = loaded.get(match[0], match[0])
        if name not in numbers:
            if name.startswith("KERNEL_param"):
                kind = kinds.get(name.split("+")[0], "?")
                numbers[name] = f"<{kind} {sum(n.startswith('KERNEL_param') for n in numbers)}>"
            else:
                kind = re.sub(r"\d+$", "", name) if name.startswith("%") else "$"
                numbers[name] = f"{kind}{len(numbers)}"
        return numbers[name]

    return "\n".join([*header, *(_NAMED.sub(number, line) for line in lines)])


def digest(kernel: Kernel) -> str:
    """Of its instructions."""
    return hashlib.sha256(normalised(kernel).encode()).hexdigest()[:12]


def resources(kernel: Kernel) -> str:
    """Registers and spilled bytes of a thread, by Triton's own ptxas."""
    import triton

    target = re.search(r"\.target (\w+)", kernel.ptx)
    assert target is not None
    new = int(re.sub(r"\D", "", target[1])) >= 100  # Triton brings an assembler of its own for these
    exe = pathlib.Path(triton.__file__).parent / f"backends/nvidia/bin/ptxas{'-blackwell' if new else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.ptx)
        file.flush()
        options = ["-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        text = subprocess.run([exe, *options], capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    stack = re.search(r"(\d+) bytes stack frame", text)
    assert registers is not None, text
    return f"{registers[1]}r {stack[1] if stack else 0}s"
