"""Every op on eight fake devices, in every mode: right results, and only sums of shared gradients move.

With tokens over devices also one gather of (M, N) each way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from harness import cases, processes, sharding
from harness.cases import Case, HeadCase, MixCase
from harness.sharding import Program
from harness.toy_op import ToyCase

MODES = ("auto", "explicit", "shard_map", "shard_map, unchecked")
# with another JAX each op and each implementation once: ops share one rule of sharding
PAIRS = [("rwkv6", "xla"), ("rwkv7", "triton"), ("rwkv6", "triton"), ("rwkv7", "xla")]
MESH, BOTH, ENTRIES = (("data", 4), ("model", 2)), {"b": "data", "h": "model"}, {"b": "data,model"}


def program(case: Any, implementation: str, mode: str, over: dict[str, str], mesh: Any = MESH, **more: Any):
    return Program(case, implementation, mode, mesh, tuple(over.items()), **more)


def parameters(programs: dict[str, Program], later: tuple[str, ...] = ()) -> list[Any]:
    marks = lambda name: [pytest.mark.one_python, pytest.mark.slow] if name.startswith(later) else []
    return [pytest.param(one, id=name, marks=marks(name)) for name, one in programs.items()]


@functools.cache
def run(one: Program) -> list[tuple[str, int]]:
    """The collectives of a program that is right."""
    collectives, error = processes.on_devices(sharding.run, one)
    assert error is None, error
    return collectives


def recurrences() -> dict[str, Program]:
    found = {}
    for op, implementation in PAIRS:
        case = Case(op, B=4, T=32, H=2, K=4, V=4, chunk_size=8)
        eight = Case(op, B=8, T=32, H=1, K=4, V=4, chunk_size=8)
        segments = Case(op, 4, 32, 2, 4, 4, chunk_size=8, layout="segments", lengths=(5, 9, 1, 17))
        bare = dict(without="initial_state")
        for mode, name, one, over, more in (
            ("auto", "batch and heads", case, BOTH, {}),
            ("auto", "batch", eight, ENTRIES, {}),
            ("auto", "segments", segments, BOTH, {}),
            ("explicit", "batch and heads", case, BOTH, {}),
            ("explicit", "batch", eight, ENTRIES, {}),
            ("explicit", "no initial state", case, BOTH, bare),
            ("shard_map, unchecked", "batch and heads", case, BOTH, {}),
            ("shard_map", "no initial state", case, BOTH, bare),
        ):
            found[f"{op} {implementation} {mode}, {name}"] = program(one, implementation, mode, over, **more)
    return found


LATER = tuple(" ".join(pair) for pair in PAIRS[2:])


@pytest.mark.parametrize("one", parameters(recurrences(), LATER))
def test_recurrences(one):
    """du is a sum over the batch, [H, K] = 8 numbers."""
    found = run(one)
    assert len(found) == (one.case.op == "rwkv6"), found
    assert all(kind in ("all-reduce", "reduce-scatter") and size <= 8 for kind, size in found), found


@pytest.mark.parametrize(
    "pair",
    [*PAIRS[:2], *(pytest.param(pair, marks=pytest.mark.one_python) for pair in PAIRS[2:])],
    ids=" ".join,
)
def test_tokens_over_devices_that_the_call_does_not_name(pair):
    """XLA gathers with plain JAX; a kernel would have to, and refuses."""
    op, implementation = pair
    case = Case(op, B=8, T=32, H=4, K=4, V=4, chunk_size=8)
    one = program(case, implementation, "auto", {"t": "data,model"})
    if implementation == "xla":
        assert run(one)
    else:
        _, error = processes.on_devices(sharding.run, one)
        assert "axis T of an argument [B, T, H, K] is sharded over mesh axis 'data'" in error


def context_parallel() -> dict[str, Program]:
    found = {}
    for op, implementation in PAIRS:
        # a kernel takes two splits a device, of one chunk each
        triton = implementation == "triton"
        T, variants = (128, ("splits",)) if triton else (64, ())
        options = dict(B=2, T=T, H=1, K=4, V=3, chunk_size=4)
        case = Case(op, **options)
        # segments begin inside a device's tokens and at their borders
        segments = Case(op, **options, layout="segments", lengths=(5, 11, 16, 8, 24, 64))
        over, mesh = {"b": "data", "t": "sequence"}, (("data", 2), ("sequence", 4))
        for mode in MODES:
            if mode != "shard_map, unchecked" or not triton:
                one = case if mode == "shard_map" else segments
                more = dict(cp="sequence", variants=variants)
                found[f"{op} {implementation} {mode}"] = program(
                    one, implementation, mode, over, mesh, **more
                )
    return found


@pytest.mark.parametrize("one", parameters(context_parallel(), LATER))
def test_context_parallel_recurrences(one):
    found, (B, H, K, V) = run(one), (1, 1, 4, 3)  # B of one device
    sizes = {kind: [n for k, n in found if k == kind] for kind, _ in found}
    M = 1 if (one.case.op, one.implementation) == ("rwkv6", "triton") else K  # diagonal there
    # from four devices: N and M, and in the backward what outputs give to states, and M
    assert sizes.pop("all-gather") == [4 * B * H * K * (M + V)] * 2, found
    # gradients of the initial state and of u, and the mean of final states that shard_map's check wants
    assert all(n in (B * H * K * V, H * K) for n in sizes.pop("all-reduce")), found
    # the last segment id of a device, forward and backward
    assert all(n == 1 for n in sizes.pop("collective-permute", [])) and not sizes, found


def on_heads() -> dict[str, Program]:
    found = {}
    for implementation in ("xla", "triton"):
        for op in ("rwkv7_keys", "rwkv7_readout"):
            case = HeadCase(op, B=8, T=8, H=4, N=4, residual="traced True")
            for mode, name, over, more in (
                *((mode, "batch and heads", BOTH, {}) for mode in MODES),
                ("auto", "batch", ENTRIES, {}),
                ("explicit", "batch", ENTRIES, {}),
                ("auto", "tokens", {"b": "data", "t": "model"}, dict(cp="model")),
                ("explicit", "tokens", {"b": "data", "t": "model"}, {}),
            ):
                name = f"{op} {implementation} {mode}, {name}"
                found[name] = program(case, implementation, mode, over, **more)
    return found


@pytest.mark.parametrize("one", parameters(on_heads()))
def test_ops_on_heads(one):
    """Gradients of vectors are sums over batch and tokens, at most five of [4, 4]."""
    found = run(one)
    assert found and all(k in ("all-reduce", "reduce-scatter") and size <= 5 * 16 for k, size in found), found


def mixes() -> dict[str, Program]:
    found, mesh = {}, (("data", 4),)
    batch = MixCase(B=4, T=5, C=6, M=2, mix_delta=True, lengths=(3, 9)), {"b": "data"}, None
    tokens = MixCase(B=2, T=8, C=6, M=2, mix_delta=True, lengths=(3, 1, 9)), {"t": "data"}, "data"
    for implementation in ("xla", "triton"):
        for mode in MODES[:3]:
            for name, (case, over, cp) in {"batch": batch, "tokens": tokens}.items():
                one = program(case, implementation, mode, over, mesh, cp=cp)
                found[f"{implementation} {mode}, {name}"] = one
    return found


@pytest.mark.parametrize("one", parameters(mixes()))
def test_norm_shift_and_mixes(one):
    """Sums of gradients; of tokens over devices also a token [2, 6], ids, and ``last``."""
    found = run(one)
    allowed = ("all-reduce", "collective-permute") if one.cp else ("all-reduce",)
    assert found and all(kind in allowed and size <= 24 for kind, size in found), found
    assert sum(kind == "collective-permute" for kind, _ in found) <= 5, found


@pytest.mark.parametrize("mode", MODES)
def test_the_toy_op(mode):
    """Whoever writes an op gets sharding from its axes: one sum, of the gradient of ``scale``."""
    one = program(ToyCase(8, 16, 4), "kernel", mode, {"b": "data"}, (("data", 8),))
    assert {kind for kind, _ in run(one)} == {"all-reduce"}


def test_the_toy_op_with_tokens_over_devices():
    over, mesh = {"t": "data"}, (("data", 8),)
    run(program(ToyCase(8, 16, 4), "kernel", "auto", over, mesh))
    _, error = processes.on_devices(
        sharding.run, program(ToyCase(8, 16, 4), "kernel", "explicit", over, mesh)
    )
    assert "axis T of x [B, T, C] must be whole" in error and "'data'" in error


def test_vmap_on_an_explicit_mesh():
    """Gradients of parameters are summed over the batch of an example, not over all examples."""
    assert processes.on_devices(vmaps) == 4


def vmaps() -> int:
    import jax

    case, done = MixCase(B=1, T=5, C=6, M=2, mix_delta=True, lengths=(2, 4)), 0
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        for implementation in ("xla", "triton"):
            for shared in (("mixes", "scale", "bias"), ()):
                cases.check_vmap(case, implementation, shared=shared)
                done += 1
    return done


@pytest.mark.parametrize("op, implementation", PAIRS)
def test_an_explicit_axis_of_one_device(op, implementation):
    """It splits nothing, and is in the types of the arrays all the same."""
    case, over = Case(op, B=8, T=32, H=1, K=4, V=3), {"b": "data", "t": "sequence"}
    found = run(program(case, implementation, "explicit", over, (("data", 8), ("sequence", 1))))
    assert {kind for kind, _ in found} <= {"all-reduce"}, found


@pytest.mark.parametrize("op, implementation", PAIRS)
def test_zeros_on_explicit_meshes(op, implementation):
    """The initial state where none is given: over tokens as over heads, and of packed sequences."""
    tokens = Case(op, B=4, T=128, H=1, K=4, V=3)
    packed = Case(op, B=1, H=2, K=4, V=4, chunk_size=8, layout="packed", lengths=(5, 11))
    for case, over in ((tokens, {"b": "data", "t": "model"}), (packed, {"h": "model"})):
        run(program(case, implementation, "explicit", over, without="initial_state"))


def refused(case: Case, implementation: str, over: dict[str, str], cp: str | None = "sequence") -> Program:
    variants = ("splits",) if implementation == "triton" else ()
    return program(case, implementation, "auto", over, (("sequence", 8),), cp=cp, variants=variants)


CALL = Case("rwkv7", B=1, T=64, H=1, K=2, V=2)
SHORT = Case("rwkv7", B=1, T=20, H=1, K=2, V=2)
PACKED = Case("rwkv7", H=1, K=2, V=2, layout="packed", lengths=(64,))
REFUSED = {
    "got 'tokens'; it has ('sequence',)": refused(CALL, "xla", {}, "tokens"),
    "axis T of r must be a multiple of mesh axis 'sequence' = 8, got T = 20": refused(SHORT, "xla", {}),
    "cu_seqlens cannot go with tokens over mesh axis 'sequence'; segment_ids can": refused(PACKED, "xla", {}),
    "8 devices split it takes 128 tokens, or any multiple, got T = 64": refused(CALL, "triton", {}),
    "'pallas' cannot run this call: it takes whole sequences, and T is": refused(CALL, "pallas", {}),
    "is sharded over mesh axis 'sequence'": refused(CALL, "triton", {"t": "sequence"}, None),
    "sequence_axis='sequence'": refused(CALL, "triton", {"t": "sequence"}, None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_split(message):
    _, error = processes.on_devices(sharding.run, REFUSED[message])
    assert message in error, error


def error_of_arrays_on_no_mesh() -> str:
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    call = jax.jit(lambda arrays: cases.call("rwkv7", arrays, sequence_axis="sequence"))
    with jax.set_mesh(mesh):
        try:
            return str(call(cases.build(CALL).arrays))
        except Exception as error:  # the type is XLA's
            return str(error)


def test_arrays_on_no_mesh():
    """JAX then tells the partitioner of no mesh."""
    error = processes.on_devices(error_of_arrays_on_no_mesh)
    assert "an argument of the call, or of the jitted function" in error, error


def test_an_axis_without_a_mesh():
    x = cases.build(CALL)
    message = "sequence_axis must be an axis of the mesh in context, got 'sequence'; there is no mesh"
    with pytest.raises(ValueError, match=message):
        cases.call("rwkv7", x.arrays, sequence_axis="sequence")
