"""How docstrings become pages: ``Example:`` is code, ``::`` starts a block, public names are links."""

from __future__ import annotations

import importlib
import re
from typing import Any

import griffe

_PACKAGES = (
    *("", ".ops", ".ops.layer", ".layers", ".models"),
    *(".generation", ".training", ".parallel", ".checkpoints", ".serve"),
)


def _public() -> dict[str, str]:
    """Where each public name is described, by its last part."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        module = importlib.import_module(f"fla_jax{package}")
        for name in module.__all__:
            found.setdefault(name, f"fla_jax{package}.{name}")
            found[f"fla_jax{package}.{name}"] = f"fla_jax{package}.{name}"
    del found["ops"], found["fla_jax.ops"]
    return found


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def __init__(self) -> None:
        self.public = _public()

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """One object, when it has been read."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"::\n\n", ":\n\n", text)
        # the first words of what is returned, in the place of a type
        text = re.sub(r"^((?:Returns|Yields):\n +)``([^`]+)``:", r"\1\2:", text, flags=re.MULTILINE)

        def link(match: re.Match[str]) -> str:
            target = self.public.get(match[1])
            own = obj.path.rsplit(".", 1)[-1] == match[1]
            return match[0] if target is None or own else f"[`{match[1]}`][{target}]"

        head, mark, examples = text.partition("Examples:\n")  # code has backticks of its own
        obj.docstring.value = re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, head) + mark + examples
