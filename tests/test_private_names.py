"""Of JAX and Triton the library uses public names, and at most five others, which one file lists."""

import ast
import pathlib
import pkgutil

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LISTED_IN = ROOT / "pallas" / "backend" / "lowering.py"
# modules of Triton that its documentation or its README describes; JAX's are those without an underscore
TRITON = ("triton.language", "triton.knobs")


def is_private(name: str) -> bool:
    package, *parts = name.split(".")
    if any(part.startswith("_") and not part.startswith("__") for part in parts):
        return True
    if package == "triton":
        return len(parts) > 1 and not name.startswith(TRITON)
    return package == "jaxlib" and parts not in ([], ["__version__"])


def foreign_names(source: str) -> set[str]:
    """Full names of what a module imports or reaches by attributes from jax, jaxlib and triton."""
    imported, used = {}, set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            imported |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in filter(lambda node: isinstance(node, ast.Attribute), ast.walk(tree)):
        base, *rest = ast.unparse(node).split(".")
        if base in imported and all(part.isidentifier() for part in rest):
            used.add(".".join([imported[base], *rest]))
    return {name for name in used if name.split(".")[0] in ("jax", "jaxlib", "triton")}


def listed() -> tuple[str, ...]:
    for node in ast.parse(LISTED_IN.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRIVATE_NAMES":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{LISTED_IN} has no PRIVATE_NAMES")


def test_what_is_private():
    public = "import jax, triton\nimport triton.language as tl\nfrom jax.extend.core import Primitive"
    public += "\ntl.dot, jax.lax.scan, triton.jit, triton.knobs.cache.dir"
    assert not [*filter(is_private, foreign_names(public))]
    for line, name in {
        "from jax._src import core": "jax._src.core",
        "import jax\ndef f(): return jax._src.core.Var": "jax._src.core.Var",
        "import triton as t\nt.runtime.driver": "triton.runtime.driver",
        "from triton.compiler import ASTSource": "triton.compiler.ASTSource",
        "from jaxlib import gpu_triton": "jaxlib.gpu_triton",
    }.items():
        assert name in [*filter(is_private, foreign_names(line))], line


def test_private_names_are_those_of_the_list():
    files = [path for folder in ("fla_jax", "pallas") for path in (ROOT / folder).rglob("*.py")]
    found = {path: {*filter(is_private, foreign_names(path.read_text()))} for path in files}
    assert len(listed()) <= 5
    # through its name in the list, an object may have further attributes
    beyond = lambda name: not any((name + ".").startswith(one + ".") for one in listed())
    wrong = {str(path): [*filter(beyond, names)] for path, names in found.items()}
    assert not {path: names for path, names in wrong.items() if names}
    assert {path.resolve() for path, names in found.items() if names} == {LISTED_IN}
    assert {*listed()} <= found[LISTED_IN]


@pytest.mark.parametrize("name", listed())
def test_private_names_exist(name):
    pytest.importorskip(name.split(".")[0])
    assert pkgutil.resolve_name(name)
