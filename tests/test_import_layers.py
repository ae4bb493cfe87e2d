"""Import layers of the package, read from the source, so that imports inside functions count as well."""

import ast
import itertools
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
# a package may import those before it and itself; `fla_jax` itself may import all
PACKAGES = (
    "core",
    "pallas",
    "ops",
    "layers",
    "models",
    "checkpoints",
    "training",
    "generation",
    "data",
    "parallel",
    "serve",
)
SHARED_BY_OPS = (
    "array_checks",
    "recurrence",
    "recurrence_checks",
    "recurrence_cp",
    "scan",
    "intra_exact",
    "intra_safe",
)
INSIDE = {
    "pallas": ("backend", "common", ("rwkv6", "rwkv7", "layer", "decode")),
    "ops": (SHARED_BY_OPS, ("rwkv6", "rwkv7", "layer", "decode")),
}


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name; pallas/ is fla_jax.pallas."""
    found = {}
    for folder, prefix in ((ROOT / "fla_jax", "fla_jax"), (ROOT / "pallas", "fla_jax.pallas")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] == "pallas":  # the symbolic link
                continue
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text())
    return found


def imports(name: str, tree: ast.Module, known: dict[str, ast.Module], package: bool) -> set[str]:
    """Modules of this package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if package else name.split(".")[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found.add(f"{target}.{alias.name}" if f"{target}.{alias.name}" in known else target)
    return {module for module in found if module in known}


def graph() -> dict[str, set[str]]:
    known = modules()
    packages = {name for name in known if any(other.startswith(name + ".") for other in known)}
    return {name: imports(name, tree, known, name in packages) for name, tree in known.items()}


def position(name: str, packages: tuple, depth: int) -> int | None:
    parts = name.split(".")
    if len(parts) <= depth:
        return None
    for i, package in enumerate(packages):
        if parts[depth] == package or (isinstance(package, tuple) and parts[depth] in package):
            return i
    return None


def test_nobody_imports_what_comes_later():
    wrong = []
    for name, targets in graph().items():
        for target in targets:
            here, there = position(name, PACKAGES, 1), position(target, PACKAGES, 1)
            if here is not None and there is not None and there > here:
                wrong.append(f"{name} -> {target}")
            if here is not None and target == "fla_jax":
                wrong.append(f"{name} -> {target}")
            if here is not None and here == there and PACKAGES[here] in INSIDE:
                inside = INSIDE[PACKAGES[here]]
                a, b = position(name, inside, 2), position(target, inside, 2)
                if a is not None and b is not None and b > a:
                    wrong.append(f"{name} -> {target}")
    assert not wrong, wrong


def test_the_diagram_shows_the_imports():
    """The arrows of docs/architecture.md are the imports between packages, without those that follow."""
    edges = set()
    for name, targets in graph().items():
        here, *others = (position(module, PACKAGES, 1) for module in (name, *targets))
        edges |= {(there, here) for there in others if None not in (here, there) and there != here}
    reached = set(edges)
    for middle, first, last in itertools.product(range(len(PACKAGES)), repeat=3):
        if {(first, middle), (middle, last)} <= reached:
            reached.add((first, last))
    follows = {(a, c) for (a, b), (b2, c) in itertools.product(reached, repeat=2) if b == b2}
    want = {(PACKAGES[a], PACKAGES[b]) for a, b in edges - follows}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert set(re.findall(r"^ +(\w+) --> (\w+)$", page, re.MULTILINE)) == want


def test_no_cycles():
    edges = {name: {t for t in targets if t != name} for name, targets in graph().items()}
    done, path = set(), []

    def visit(name):
        if name in path:
            raise AssertionError(" -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            path.append(name)
            for target in edges[name]:
                visit(target)
            path.pop()
            done.add(name)

    for name in edges:
        visit(name)


def test_nothing_is_imported_by_a_string():
    found = [
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if "import_module" in ast.dump(node) and isinstance(node, ast.Call)
    ]
    assert not found, found
