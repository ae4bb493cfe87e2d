"""What the library offers: every name in ``__all__`` of a package under fla_jax, found and not listed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import fla_jax


def packages() -> list[str]:
    """The packages whose ``__all__`` is the public interface."""
    names = ["fla_jax"]
    for module in pkgutil.walk_packages(fla_jax.__path__, "fla_jax."):
        inside = module.name.split(".")[1]  # kernels are called through ops, core is what ops are made of
        if module.ispkg and inside not in ("pallas", "core"):
            names.append(module.name)
    return [name for name in names if hasattr(importlib.import_module(name), "__all__")]


def names() -> dict[str, Any]:
    """Every public name with its package in front, and what it stands for."""
    found = {}
    for package in packages():
        module = importlib.import_module(package)
        for name in module.__all__:
            if not inspect.ismodule(value := getattr(module, name)):
                found[f"{package}.{name}"] = value
    return found


def documented() -> dict[str, Any]:
    """Functions and classes, each once, under the first of its public names."""
    found: dict[int, tuple[str, Any]] = {}
    for name, value in names().items():
        if inspect.isfunction(value) or inspect.isclass(value):
            found.setdefault(id(value), (name, value))
    return dict(found.values())
