"""Counts that keep the kernels readable: parameters of an entry, places that look at the GPU, file names."""

import ast
import collections
import pathlib
import re

import pytest

PALLAS = pathlib.Path(__file__).parents[2] / "pallas"
FILES = sorted(PALLAS.rglob("*.py"))


def named(path):
    return str(path.relative_to(PALLAS))


def functions(of_triton):
    """All functions, either Triton's (``triton.jit``, ``triton.constexpr_function``) or the others."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if ("triton." in decorators) == of_triton:
                    yield path, node


def kernels():
    """Entries of kernels: functions of Triton whose names end so."""
    return [node for _, node in functions(of_triton=True) if node.name.endswith("_kernel")]


def test_functions_of_host_code_are_annotated():
    """Triton's values are untyped, so that mypy does not ask for this in pallas/."""
    missing = []
    for path, node in functions(of_triton=False):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [a.arg for a in parameters if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or (node.returns is None and node.name != "__init__"):
            missing.append(f"{named(path)}:{node.lineno} {node.name} {bare}")
    assert not missing


def test_entries_have_few_parameters_and_one_config():
    found = {node.name: [ast.unparse(a) for a in node.args.args] for node in kernels()}
    assert len(found) >= 25
    for name, parameters in found.items():
        assert len(parameters) <= 6, name
        constants = [p for p in parameters if "constexpr" in p]
        assert constants == parameters[-1:], name


@pytest.mark.parametrize("pattern", [r"\| dict\(", r"\bunused\(\)", r"\bfor name in names\b.*_\b"])
def test_no_arguments_by_name(pattern):
    found = [named(path) for path in FILES if re.search(pattern, path.read_text())]
    assert not found


def test_tables_alone_look_at_the_gpu():
    """Who asks for its kind: the tables, and the call, which compiles for it."""
    wanted = re.compile(r"current_gpu\(|\.wgmma|\.large_tiles|compute_capability")
    found = {named(path) for path in FILES if wanted.search(path.read_text())}
    assert all(name.endswith("variants.py") or name == "backend/triton.py" for name in found), found


def test_one_file_of_a_name():
    """But for the two ops, whose files correspond."""
    count = collections.Counter(path.name for path in FILES if path.parent.name not in ("rwkv6", "rwkv7"))
    del count["__init__.py"]
    assert max(count.values()) == 1, count.most_common(3)
    ops = {path.name for path in FILES if path.parent.name in ("rwkv6", "rwkv7")} - {"__init__.py"}
    assert not ops & set(count)
