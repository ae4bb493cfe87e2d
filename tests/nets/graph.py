"""The computation of a StableHLO program, apart from its names, its order and its division into functions.

Every value is hashed from the operation that makes it and the hashes of its operands, the results of called
functions from their bodies. So neither what nothing uses nor what is computed twice counts, and functions
may be inlined, split or renamed.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

# what says how a thing is called or where it lies in this process
_IGNORED = {"sym_name", "sym_visibility", "jax.arg_info", "jax.result_info", "callee", "loc", "function_type",
            "called_computations", "res_attrs", "arg_attrs", "operandSegmentSizes"}  # fmt: skip
_CALLBACKS = re.compile("callback|CustomSPMDPartitioning|custom_partitioning")


def _hash(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


class _Hasher:
    def __init__(self, module: Any):
        self.functions = {
            str(op.attributes["sym_name"]).strip('"'): op
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self.meshes = sorted(str(op) for op in module.body.operations if op.operation.name == "sdy.mesh")
        self.called: dict[Any, list[str]] = {}
        self.effects: list[str] = []

    def function(self, name: str, arguments: tuple[str, ...], depth: int = 0) -> list[str]:
        """Hashes of a function's results."""
        key = name, arguments, depth
        if key not in self.called:
            block = self.functions[name].regions[0].blocks[0]
            self.called[key] = self.block(block, arguments, {}, depth)
        return self.called[key]

    def block(self, block: Any, arguments: Any, outer: dict[Any, str], depth: int) -> list[str]:
        """Hashes of what the block's last operation returns; ``depth`` regions are around it."""
        values = outer | dict(zip(block.arguments, arguments))
        for op in block.operations:
            op = op.operation
            operands = tuple(values[x] for x in op.operands)
            if op.name in ("func.return", "stablehlo.return", "sdy.return"):
                return list(operands)
            if op.name in ("func.call", "call"):
                results = self.function(str(op.attributes["callee"]).lstrip("@"), operands, depth)
            else:
                made = self.operation(op, operands, values, depth)
                results = [_hash(made, i) for i in range(len(op.results))]
            values.update(zip(op.results, results))
        return []

    def operation(self, op: Any, operands: Any, values: dict[Any, str], depth: int) -> str:
        attributes = {name: op.attributes[name] for name in op.attributes}
        opaque = bool(_CALLBACKS.search(str(attributes.get("call_target_name", ""))))
        parts: list[Any] = []
        for name, value in sorted(attributes.items()):
            if name in _IGNORED or (opaque and name in ("backend_config", "mhlo.backend_config")):
                continue
            parts.append((name, _text(value)))
        for name in re.findall(r"@([\w.$-]+)", str(attributes.get("called_computations", ""))):
            size = len(self.functions[name].regions[0].blocks[0].arguments)
            parts.append(self.function(name, tuple(_hash("called", i) for i in range(size))))
        regions = []
        for i, block in enumerate(block for region in op.regions for block in region.blocks):
            inside = [_hash("argument", depth, i, j, str(x.type)) for j, x in enumerate(block.arguments)]
            regions.append(self.block(block, inside, values, depth + 1))
        made = _hash(op.name, parts, operands, regions, [str(x.type) for x in op.results])
        if str(attributes.get("has_side_effect", "false")) == "true":
            self.effects.append(made)
        return made


def _text(attribute: Any) -> str:
    text = str(attribute)
    return text if len(text) < 4000 else hashlib.sha256(text.encode()).hexdigest()


def digest(module: Any) -> str:
    """Of the results that ``main`` computes from its arguments; of their types, shardings and donation."""
    hasher = _Hasher(module)
    main = hasher.functions["main"]
    arguments = main.regions[0].blocks[0].arguments
    about = [_named(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else []]
    about += [_named(main.attributes["res_attrs"]) if "res_attrs" in main.attributes else []]
    inputs = tuple(_hash("input", i, str(x.type)) for i, x in enumerate(arguments))
    results = hasher.function("main", inputs)
    return _hash(results, about, hasher.meshes, hasher.effects)[:12]


def _named(attributes: Any) -> list[str]:
    """Each argument's attributes, but for its name."""
    return [
        ", ".join(
            f"{named.name} = {named.attr}"
            for named in sorted(one, key=lambda named: named.name)
            if named.name not in _IGNORED
        )
        for one in attributes
    ]


def readable(module: Any) -> str:
    """The program's text, functions named by first use: what is compared by eye where digests differ."""
    text = re.sub(r" loc\(.*?\)", "", str(module))
    text = re.sub(r"jax\.(arg|result)_info = \"(\\.|[^\"])*\",? ?", "", text)
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"@f{len(names)}")

    return re.sub(r"@(?!main\b|Sharding|SPMD|xla|mesh\b)[\w.$]+", name, text)
