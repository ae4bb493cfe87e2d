"""A mesh in context decides where a traced call runs: `jax.set_mesh` with one CPU device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from harness import cases
from harness.cases import Case
from harness.tiers import each_op
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fla_jax.core.gpu import platform_of
from fla_jax.layers import RWKV6Attention, RWKV7Attention

each_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def place(arrays, mesh, spec):
    return {name: jax.device_put(x, NamedSharding(mesh, spec(name))) for name, x in arrays.items()}


@each_op
@each_kind
@pytest.mark.parametrize("T", [1, 3])
def test_token_by_token_under_a_mesh(op, kind, T):
    """A mesh names its devices: on a CPU they were taken for a GPU that is lowered for."""
    case = Case(op, B=2, T=T, H=2, K=16, V=16)
    arrays = cases.build(case).arrays
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        put = place(arrays, mesh, lambda name: P() if name == "u" else P("data"))
        call = lambda arrays: cases.call(op, arrays, form="fused_recurrent")
        for run in (call, jax.jit(call)):
            cases.compare(case, cases.Results(run(put), {}), cases.expected(case))


@each_op
def test_an_axis_of_one_device(op):
    """With explicit axes T is over an axis of one device too: it stays in the types."""
    case = Case(op, B=2, T=4, H=2, K=16, V=16)
    arrays = cases.build(case).arrays
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = place(arrays, mesh, lambda name: P(None, "seq") if name in cases.TOKENS[op] else P())
        for form in ("chunk", "fused_recurrent"):
            got = cases.call(op, put, form=form)
            assert jax.typeof(got["o"]).sharding.spec == P(None, "seq", None, None)
            cases.compare(case, cases.Results(got, {}), cases.expected(case))


@each_op
def test_an_explicit_mesh_that_is_not_in_context(op):
    """Types then name shardings that nothing here can follow; JAX's errors named its internal operations."""
    arrays = cases.build(Case(op, B=2, T=4, H=2, K=16, V=16)).arrays
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    put = place(arrays, mesh, lambda name: P() if name == "u" else P("data"))
    version = int(op[-1])
    model, attention = small.model(version), (RWKV6Attention, RWKV7Attention)[version - 6](32, head_dim=16)
    tokens, x = (
        jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (small.tokens(2, 3), np.ones((2, 3, 32)))
    )
    calls = {
        f"chunk_{op}": (lambda arrays: cases.call(op, arrays), put),
        type(model).__name__: (model.init, jax.random.key(0), tokens),
        type(attention).__name__: (attention.init, jax.random.key(0), x),
    }
    for name, (call, *args) in calls.items():
        wanted = rf"{name}: an argument lies on a mesh with explicit axes \('data',\).* jax.set_mesh\(mesh\)"
        for run in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=wanted):
                run(*args)
        with jax.set_mesh(mesh):
            jax.eval_shape(call, *args)


def test_the_platform_of_a_traced_call():
    """Concrete arrays first, then the mesh in context, then JAX's default device."""
    x = jnp.ones(2)
    assert platform_of([x]) == "cpu"

    @jax.jit
    def traced(x):
        found.append(platform_of([x]))
        return x

    found: list[str] = []
    known = {"platform": "gpu"} if "platform" in AbstractDevice.__dataclass_fields__ else {}
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, **known)
    traced.lower(x)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
        traced.lower(x)
    assert found == ["cpu", "gpu" if known else "cpu"]
    assert platform_of([np.ones(2)]) == jax.default_backend()
