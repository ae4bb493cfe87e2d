"""`jax.vmap` of kernels and second derivatives of plain JAX, on meshes of eight fake devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, processes, sharding, tiers
from harness import toy_op as toy
from harness.cases import Case, HeadCase, MixCase
from harness.sharding import Program
from harness.toy_op import ToyCase
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_models import float64

MESH = (("data", 2), ("model", 2), ("sequence", 2))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# mesh axes of the mapped axis and of the axes of a call
PLACES: dict[str, tuple[str | None, dict[str, str]]] = {
    "neither": (None, {}),
    "mapped": ("data", {}),
    "batch": (None, {"b": "data"}),
    "mapped and batch": ("model", {"b": "data"}),
    "batch over both": (None, {"b": "data,model"}),
}


def mesh_of(kind: str) -> jax.sharding.Mesh:
    names, sizes = zip(*MESH)
    return jax.make_mesh(sizes, names, axis_types=(KINDS[kind],) * len(names), devices=jax.devices())


def placed(mesh: jax.sharding.Mesh, x: Any, specs: Any) -> Any:
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), x, specs)


def map_case(
    case: Any, implementation: str, kind: str, place: str, shared: tuple[str, ...], spmd: bool
) -> bool:
    """Compares outputs and gradients of a `jax.vmap` over two calls with the oracle's of each."""
    entry, over = PLACES[place]
    given = cases.build(case)
    mapped = {"cotangents", *given.arrays, *given.layout} - {*shared}
    x, axes, slices = cases.stacked(case, mapped)
    program = Program(case, implementation, kind, MESH, tuple(over.items()))
    specs = cases.Inputs(
        *(
            {name: spec if on[name] is None else P(entry, *spec) for name, spec in part.items()}
            for part, on in zip(sharding.specs_of(program, x), axes)
        )
    )
    run = cases.runner(case.op, implementation, **case.options())
    run = jax.vmap(run, in_axes=tuple(axes), spmd_axis_name=entry if spmd else None)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        got = jax.device_get(jax.jit(run)(*placed(mesh, x, specs)))
    for i, one in enumerate(slices):
        cases.compare(case, jax.tree.map(lambda a, i=i: a[i], got), case.oracle(one))
    return True


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["kernel", "plain"])
def test_vmap(implementation, kind, place):
    """Merged into the batch (``scale`` is shared), and one by one (``scale`` is mapped)."""
    run = functools.partial(processes.on_devices, map_case, ToyCase(4, 3, 5), implementation, kind, place)
    assert run(("scale",), False) and run((), False) and run((), PLACES[place][0] is not None)


CALLS = {
    "rwkv6 triton": (Case("rwkv6", B=4, T=16, H=1, K=4, V=4), "triton", ("u",)),
    "rwkv7 triton": (Case("rwkv7", B=4, T=16, H=1, K=4, V=4), "triton", ()),
    "rwkv7_keys": (HeadCase("rwkv7_keys", B=4, T=4, H=1, N=4, residual="traced True"), "triton", ()),
    "norm_shift_mix": (MixCase(B=4, T=5, C=6, M=2, mix_delta=True, lengths=(2, 4)), "triton", ("mixes",)),
}


@pytest.mark.parametrize("call", tiers.first(CALLS))
def test_vmap_of_ops_on_explicit_meshes(call):
    case, implementation, shared = CALLS[call]
    for place in ("mapped", "batch", "mapped and batch"):
        assert processes.on_devices(map_case, case, implementation, "explicit", place, shared, False)


def map_twice(kind: str) -> tuple[float, tuple[int, ...]]:
    """The error with two mapped axes, over two mesh axes; the shape of a `jax.vmap` over nothing."""
    mesh, rng = mesh_of(kind), np.random.default_rng(0)
    x, scale = rng.normal(size=(2, 4, 2, 3, 5)), rng.normal(size=(4, 5))
    run = jax.grad(lambda x, scale: jnp.sum(toy.running_sum(x, scale, "kernel") ** 2), (0, 1))
    mapped = jax.vmap(jax.vmap(run), (0, None))
    with float64(), jax.set_mesh(mesh):
        args = placed(mesh, (x, scale), (P("data", "model", "sequence"), P("model")))
        dx, dscale = jax.device_get(jax.jit(mapped)(*args))
        nothing = jax.vmap(run, (0, None))(jnp.zeros((0, 2, 3, 5)), jnp.ones(5))[0].shape
    sums = np.cumsum(x, 3)
    later = 2 * np.cumsum(sums[..., ::-1, :], 3)[..., ::-1, :]
    wide = scale[:, None, None]
    want = later * wide**2, np.sum(later * x, (2, 3)) * scale
    return max(np.max(np.abs(dx - want[0])), np.max(np.abs(dscale - want[1]))), nothing


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_of_vmap(kind):
    error, shape = processes.on_devices(map_twice, kind)
    assert error < 1e-11 and shape == (0, 2, 3, 5)


def products(case: Case, implementation: str, x: Any, along: Any, cp: str | None = None) -> tuple[Any, ...]:
    """The Hessian of a loss times ``along``: by grad of grad, jvp of grad, and `jax.vmap` of that."""
    options = case.options() | {"implementation": implementation}

    def loss(arrays):
        got = cases.call(case.op, arrays, x.layout, **options | ({"sequence_axis": cp} if cp else {}))
        return sum(jnp.sum(jnp.sin(got[name]) * c) for name, c in x.cotangents.items())

    grad = jax.grad(loss)
    dot = lambda a: sum(jnp.sum(a[name] * along[name]) for name in along)
    push = lambda size: jax.jvp(grad, (x.arrays,), (jax.tree.map(lambda d: size * d, along),))[1]
    mapped = jax.tree.map(lambda y: y[1] - y[0], jax.vmap(push)(jnp.arange(1.0, 3.0)))
    return jax.grad(lambda a: dot(grad(a)))(x.arrays), push(1), mapped


def differentiate_twice(program: Program) -> float:
    """The largest difference to the products that one device makes, of another implementation."""
    case, x = program.case, cases.build(program.case)
    along = {name: np.random.default_rng(1).normal(size=a.shape) for name, a in x.arrays.items()}
    other = "xla" if program.implementation == "reference" else "reference"
    with float64():
        want = jax.device_get(jax.jit(functools.partial(products, case, other))(x, along)[1])
        mesh = mesh_of("explicit" if program.mode == "explicit" else "auto")
        specs = sharding.specs_of(program, x)
        with jax.set_mesh(mesh):
            run = functools.partial(products, case, program.implementation, cp=program.cp)
            if program.mode == "shard_map":
                run = jax.shard_map(run, in_specs=(specs, specs.arrays), out_specs=(specs.arrays,) * 3)
            got = jax.device_get(jax.jit(run)(*placed(mesh, (x, along), (specs, specs.arrays))))
    return max(float(np.max(np.abs(one[name] - want[name]))) for one in got for name in want)


def twice(op: str, implementation: str, mode: str, over: dict[str, str], cp: str | None = None) -> Program:
    lengths = dict(layout="segments", lengths=(3, 5)) if cp else {}
    case = Case(op, B=2, T=8, H=2, K=2, V=2, chunk_size=4, dtype="float64", **lengths)
    return Program(case, implementation, mode, MESH, tuple(over.items()), cp)


BOTH, TOKENS = {"b": "data", "h": "model"}, {"b": "data", "t": "sequence"}
TWICE = {
    "explicit, batch and heads": twice("rwkv6", "xla", "explicit", BOTH),
    "auto, tokens": twice("rwkv6", "xla", "auto", TOKENS, "sequence"),
    "explicit, batch and heads, rwkv7": twice("rwkv7", "xla", "explicit", BOTH),
    "auto, tokens, rwkv7": twice("rwkv7", "xla", "auto", TOKENS, "sequence"),
    "auto, batch and heads": twice("rwkv7", "xla", "auto", BOTH),
    "explicit, tokens": twice("rwkv7", "xla", "explicit", TOKENS, "sequence"),
    "explicit, reference": twice("rwkv7", "reference", "explicit", BOTH),
    "auto, reference": twice("rwkv7", "reference", "auto", BOTH),
    "shard_map": twice("rwkv7", "xla", "shard_map", BOTH),
}


@pytest.mark.parametrize("name", tiers.first(TWICE, 2))
def test_second_derivatives(name):
    assert processes.on_devices(differentiate_twice, TWICE[name]) < 1e-11


def kernel_twice() -> str:
    mesh, x = mesh_of("explicit"), np.ones((4, 3, 5), np.float32)
    first = jax.grad(lambda x: jnp.sum(toy.running_sum(x, jnp.ones(5), "kernel") ** 2))
    with jax.set_mesh(mesh), pytest.raises(TypeError) as error:
        jax.grad(lambda x: jnp.sum(first(x)))(placed(mesh, x, P("data")))
    return str(error.value)


def test_kernels_have_first_derivatives_only():
    assert "need implementation='plain'" in processes.on_devices(kernel_twice)
