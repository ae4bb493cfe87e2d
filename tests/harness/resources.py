"""Registers, spilled bytes and shared memory of every Triton kernel, by GPU generation, without a GPU.

    PYTHONPATH=.:tests python -m harness.resources                what tests/kernels/test_resources.py checks
    PYTHONPATH=.:tests python -m harness.resources --record       the same; writes its spills into spills.json
    PYTHONPATH=.:tests python -m harness.resources "rwkv7 sm_86 128 float32 any"     one call of any size

On a GPU jaxlib assembles the same PTX with another ptxas; those of CUDA 12.8 to 13.5 differ little.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import pathlib
import re
from typing import Any

from . import cases, lowering
from .lowering import Program, Usage

STATED = pathlib.Path(__file__).parents[1] / "kernels" / "spills.json"


def _recurrences() -> list[str]:
    """Each kernel for each kind of GPU, most for sm_90. sm_86 is as sm_89."""
    found = []
    for op in cases.OPS:
        calls = ["sm_90 64 bfloat16 any", "sm_89 128 bfloat16 bounded", "sm_89 64 float32 bounded"]
        calls += [f"sm_{capability} 64 bfloat16 bounded" for capability in (80, 100, 120)]
        # without what small batches add
        again = ["sm_89 64 bfloat16 any"] + [f"sm_90 {head} bfloat16 bounded" for head in (64, 128)]
        again += [f"sm_90 {head} float32 any" for head in (64, 128)]
        found += [f"{op} {call}" for call in calls] + [f"{op} {call} large" for call in again]
    return (
        found
        + ["rwkv7 recurrent sm_89 64 bfloat16 any"]
        + [
            f"{op} recurrent sm_{capability} 64 {dtype} any"
            for op in cases.OPS
            for capability in (80, 90, 100, 120)
            for dtype in ("bfloat16", "float32")
        ]
    )


def _decodes(every: bool) -> dict[str, tuple[Any, ...]]:
    """(capability, version, width, batch, options) of decoded tokens by name."""
    calls = [(90, 7, 2048, 1, {}), (90, 6, 2048, 1, {}), (90, 7, 2048, 32, {}), (120, 7, 1024, 256, {})]
    calls += [(90, 7, 2048, B, dict(quantised=(8, 128))) for B in (1, 32)]
    if every:
        calls += [(90, v, C, B, {}) for v in (7, 6) for C in (1024, 2048) for B in (1, 32)]
        calls += [(90, 7, C, 1, {}) for C in (768, 4096)] + [(90, 7, 2048, B, {}) for B in (256, 4)]
        calls += [
            (90, 7, 1024, 1, dict(quantised=(8, 128), dtype="float32")),
            *((120, 7, 1024, B, dict(quantised=(8, 128))) for B in (16, 64, 128)),
            *((90, 7, C, 1, dict(quantised=(4, 32))) for C in (768, 2048, 4096)),
            (80, 7, 1024, 1, {}),
            (90, 7, 1024, 8, dict(state="bfloat16")),
            (90, 7, 1024, 1, dict(dtype="float32")),
            (120, 7, 1024, 32, {}),
            (90, 6, 4096, 4, dict(quantised=(8, 64))),
            (120, 6, 2048, 1, dict(quantised=(4, 16))),
            (90, 7, 4096, 2, dict(dtype="float32")),
        ]
    return {f"decode sm_{c[0]} rwkv{c[1]} {c[2]} {c[3]} {[*c[4].values()]}": c for c in calls}


RECURRENCES = _recurrences()
DECODES, EVERY_DECODE = _decodes(False), _decodes(True)
MIXES = {
    f"norm_shift_mix sm_{capability} {kind} {C} {dtype}": (capability, kind, C, dtype)
    for capability, kind, C, dtype in (
        *((capability, "six", 1024, "bfloat16") for capability in (80, 90, 120)),
        (90, "six", 8192, "bfloat16"),
        (90, "five, moved", 1024, "bfloat16"),
        (90, "two", 2048, "float32"),
    )
}
HEADS = [
    f"{op} sm_{capability} 64 {dtype}"
    for op, (capability, dtype) in itertools.product(
        cases.HEAD_OPS, ((80, "bfloat16"), (90, "bfloat16"), (120, "bfloat16"), (86, "float32"))
    )
]
PROGRAMS = [*RECURRENCES, *HEADS, *MIXES, *DECODES]


def _programs(name: str) -> tuple[int, list[Program]]:
    if name in EVERY_DECODE:
        capability, version, C, B, options = EVERY_DECODE[name]
        return capability, [lowering.decode(version, C, B, **options)]
    if name in MIXES:
        capability, *rest = MIXES[name]
        return capability, [lowering.mix(*rest)]
    op, recurrent, capability, size, dtype, *more = re.fullmatch(
        r"(\w+)( recurrent)? sm_(\d+) (\d+) (\w+) ?(\w*) ?(\w*)", name
    ).groups()
    if op in cases.HEAD_OPS:
        made = [lowering.on_heads(op, int(size), dtype)]
        # keys in a loop over layers that nothing differentiates have one more kernel
        made += [lowering.on_heads(op, int(size), dtype, gradient=False)] if op == "rwkv7_keys" else []
        return int(capability), made
    gate, large = more
    call = dict(D=int(size), dtype=dtype, gate=gate, form="fused_recurrent" if recurrent else "chunk")
    made = [lowering.recurrence(op, **call)]
    if not large and not recurrent:
        made += [lowering.recurrence(op, **call, B=1, H=4, gradient=gradient) for gradient in (True, False)]
    return int(capability), made


def usages(name: str) -> tuple[int, list[Usage]] | str:
    """The number of kernels of a call and their resources, those of small batches included; or why not."""
    reason = lowering.cannot_lower()
    if reason is not None:
        return reason
    capability, programs = _programs(name)
    (found, calls), *others = (lowering.launches(program, capability) for program in programs)
    known = {launch.kernel for launch in found}
    for _, more in others:
        calls += [made for made in more if made[0].kernel.__name__ not in known]
    return len(found), lowering.usages(calls)


def stated_name(name: str, kernel: str) -> str:
    """What spills.json calls a kernel of a recurrence."""
    return f"{kernel} {name.removesuffix(' large').split(' ', 1)[1]}"


def release() -> str:
    """The installed Triton as spills.json names it: "3.6" for 3.6.0."""
    return ".".join(importlib.metadata.version("triton").split(".")[:2])


def table(found: dict[str, list[Usage]]) -> str:
    lines = [f"{'call':38} {'kernel':26} warps registers spilled  shared"]
    for name, used in found.items():
        for u in used:
            lines.append(f"{name:38} {u.kernel:26} {u.warps:5} {u.registers:9} {u.spilled:7} {u.shared:7}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=PROGRAMS, help="calls, see the names in the table")
    parser.add_argument("--record", action="store_true", help="write the spills into spills.json")
    args = parser.parse_args()
    found = {name: usages(name)[1] for name in args.names}
    print(table(found))
    if args.record:
        spills: dict[str, int] = {}
        for name in RECURRENCES:
            for u in found[name]:
                key = stated_name(name, u.kernel)
                spills[key] = max(u.spilled, spills.get(key, 0))
        stated = json.loads(STATED.read_text())
        stated[release()] = {key: spilled for key, spilled in sorted(spills.items()) if spilled}
        STATED.write_text(json.dumps(dict(sorted(stated.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
