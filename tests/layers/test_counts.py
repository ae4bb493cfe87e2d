"""Counts that keep layers and families readable, read from the source."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("core", "ops", "layers", "models", "checkpoints", "generation", "data", "training", "parallel")


def sources(*packages):
    """Every module of these packages of fla_jax: path and text."""
    for package in packages:
        for path in sorted((ROOT / "fla_jax" / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def method(path, cls, name="__call__"):
    """The lines of a method's body, without its docstring and empty lines."""
    text = (ROOT / path).read_text()
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == cls)
    (function,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == name)
    first = function.body[1] if ast.get_docstring(function) else function.body[0]
    return [line for line in text.splitlines()[first.lineno - 1 : function.end_lineno] if line.strip()]


LAYERS = [
    ("fla_jax/layers/rwkv6.py", "RWKV6Attention"),
    ("fla_jax/layers/rwkv7.py", "RWKV7Attention"),
    ("fla_jax/layers/feed_forward.py", "FeedForward"),
]
SHARDING = re.compile(r"shard|enter_tp|to_tp|constrain|mesh|sequence_axis|\blength_axis")


@pytest.mark.parametrize("path, cls", LAYERS)
def test_calls_of_layers_are_short(path, cls):
    assert len(method(path, cls)) <= 60


@pytest.mark.parametrize("path, cls", LAYERS)
def test_calls_of_layers_hardly_speak_of_sharding(path, cls):
    lines = [line for line in method(path, cls) if SHARDING.search(line)]
    assert len(lines) <= 2, lines


def test_one_call_of_all_feed_forwards_and_one_block():
    calls = [
        (node.name, item.name)
        for _, text in sources("layers", "models")
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(("FeedForward", "Block"))
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == "__call__"
    ]
    assert calls == [("FeedForward", "__call__"), ("RWKVBlock", "__call__")]


# asking for a family otherwise than by `family_of` and its table
FAMILY_CHECKS = re.compile(
    r"isinstance\([^)]*RWKV[67]|type\(\w+\) (not in|in|is) [^:]*RWKV[67]|\"(r_k|time_faaaa)\" in "
)


def test_families_are_told_apart_in_one_table():
    found = [
        f"{path}:{i + 1}"
        for path, text in sources(*PACKAGES)
        for i, line in enumerate(text.splitlines())
        if FAMILY_CHECKS.search(line) and ">>>" not in line
    ]
    assert not found, found
