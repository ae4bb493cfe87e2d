"""Counts that keep the library readable: functions between a call and its kernel, `Any`."""

import ast
import pathlib
import traceback
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from fla_jax.core.gpu import GPU, GPUS, current_gpu, lowering_for
from fla_jax.ops import OPS, chunk_rwkv6, chunk_rwkv7
from fla_jax.ops.layer import rwkv7_readout
from fla_jax.pallas.backend import triton

ROOT = pathlib.Path(__file__).parent.parent
# `Any` is for pytrees of foreign code. The aim is 150 outside pallas: lower a row, never raise one.
ANY = {
    "core": 3,
    "ops": 0,
    "layers": 8,
    "models": 7,
    "checkpoints": 11,
    "training": 0,
    "generation": 31,
    "data": 3,
    "parallel": 0,
    "pallas": 4,
    "serve": 0,
    "versions.py": 0,
    "__init__.py": 0,
}


def sources(package: str) -> list[pathlib.Path]:
    path = ROOT / "fla_jax" / package
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def names(path: pathlib.Path, name: str) -> int:
    return sum(isinstance(x, ast.Name) and x.id == name for x in ast.walk(ast.parse(path.read_text())))


@pytest.mark.parametrize("package", ANY)
def test_any(package):
    found = {str(path.relative_to(ROOT)): names(path, "Any") for path in sources(package)}
    assert sum(found.values()) <= ANY[package], {name: n for name, n in found.items() if n}


def test_any_counts_every_package():
    skipped = {"__pycache__", "py.typed"}
    assert {path.name for path in (ROOT / "fla_jax").iterdir()} - skipped == set(ANY)


def asked_modules(path: pathlib.Path) -> list[str]:
    """Calls of getattr and hasattr on something imported, or on an implementation's module."""
    tree, found = ast.parse(path.read_text()), []
    modules = {"module", "rule", "implementation"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            aliases = [alias for alias in node.names if isinstance(node, ast.Import) or alias.name.islower()]
            modules |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id=name), *_]):
                found += [f"{path.relative_to(ROOT)}:{node.lineno}"] if name in modules else []
    return found


def test_nobody_asks_what_a_module_offers():
    """Modules of implementations are typed by `Rule`, which mypy checks."""
    paths = [path for package in ANY for path in sources(package)]
    assert not [where for path in paths for where in asked_modules(path)]


def ways(f, *args) -> dict[str, list[str]]:
    """Our functions between ``f`` and each kernel call that tracing ``f`` makes, backends not counted."""
    found = {}
    run = triton._run

    def record(call, arrays):
        frames = [
            f"{pathlib.Path(frame.filename).stem}.{frame.name}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(f"{ROOT / 'fla_jax'}/") and "/backend/" not in frame.filename
        ]
        found.setdefault(call.kernel.__name__, frames)
        return run(call, arrays)

    with mock.patch.object(triton, "_run", record), lowering_for(90):
        jax.eval_shape(f, *args)
    return found


def arrays(count: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((8, 32, 16, 64), jnp.bfloat16)] * count


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
def test_way_of_an_array(op):
    """From the call to the kernel at most five functions, and four back: see CONTRIBUTING.md."""

    def loss(*x):
        if op == "rwkv7":
            o, _ = chunk_rwkv7(*x, implementation="triton")
        else:
            o, _ = chunk_rwkv6(*x, jnp.ones((16, 64)), implementation="triton")
        return jnp.sum(o.astype(jnp.float32))

    x = arrays(6 if op == "rwkv7" else 4)
    call = [f"api.chunk_{op}", "op.__call__"]
    assert ways(loss, *x)[f"{op}_fwd_kernel"] == [*call, "vjp._apply", "vjp._fwd", "chunk_host.fwd"]
    found = ways(jax.grad(loss), *x)
    assert found[f"{op}_fwd_kernel"] == [*call, "vjp._apply_fwd", "vjp._fwd", "chunk_host.fwd"]
    back = ["vjp._apply_bwd", "vjp._bwd", "vjp.on_shard", "chunk_host.bwd"]
    assert found[f"{op}_bwd_kernel"][:4] == back
    assert all(name.startswith("chunk_host.") for name in found[f"{op}_bwd_kernel"][4:])


def test_way_of_an_array_of_a_layer_op():
    x, vector = arrays(5), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    run = lambda x, p: rwkv7_readout(*x, scale=p, bias=p, r_k=p, implementation="triton")
    (way,) = ways(run, x, vector).values()
    assert way[:5] == ["readout.rwkv7_readout", "op.__call__", "vjp._apply", "vjp._fwd", "readout_host.fwd"]


def test_a_gpu_generation_is_a_row():
    """Kernels can be made for it, and an unknown one gets the smallest tiles."""
    with lowering_for(70):
        assert current_gpu() == GPU(70, 99 << 10, wgmma=False, large_tiles=False)
    with mock.patch.dict(GPUS, {130: GPU(130, 300 << 10, large_tiles=True)}), lowering_for(130):
        assert current_gpu().large_tiles
        x = arrays(6)
        made = jax.eval_shape(lambda *x: chunk_rwkv7(*x, implementation="triton")[0], *x)
    assert made.shape == (8, 32, 16, 64)


def test_ops_by_name():
    assert all(op.name == name for name, op in OPS.items())
    for op in OPS.values():
        for name in (*op.inputs._fields, *op.outputs._fields):
            missing = name not in op.axes and not (op.name.endswith("rwkv7") and name == "u")
            assert not missing, (op.name, name)
