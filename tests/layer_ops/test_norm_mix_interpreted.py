"""The kernels of norm, shift and mixes in Triton's interpreter, float32, against the float64 reference."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
from layer_ops import norm_mix_cases as cases
from layer_ops.norm_mix_cases import CASES, Case

from fla_jax.ops.layer import norm_shift_mix
from fla_jax.pallas.backend import triton as run

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not run.INTERPRET:
    pytest.skip(
        "TRITON_INTERPRET is not set: tests/gpu runs the kernels themselves",
        allow_module_level=True,
    )

from fla_jax.pallas.layer import norm_shift_mix_host, norm_shift_mix_variants

SPAN = 4  # tokens of a stretch


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    """Rows of eleven tokens are cut into three stretches; traces made otherwise are not used again."""
    monkeypatch.setattr(norm_shift_mix_variants, "MIN_BLOCK_LEN", SPAN)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def by_tiles(monkeypatch):
    """Nothing fits the registers of a program, and tiles hold 128 channels."""
    tiles = [one for one in norm_shift_mix_variants.VARIANTS if not one.is_whole]
    monkeypatch.setattr(norm_shift_mix_variants, "VARIANTS", tiles)
    small = {
        name: one._replace(channels=min(one.channels, 128))
        for name, one in norm_shift_mix_variants.TILES.items()
    }
    monkeypatch.setattr(norm_shift_mix_variants, "TILES", small)


@pytest.mark.one_python
@pytest.mark.parametrize(
    "case",
    [
        CASES["everything"],
        CASES["one token"],
        Case(B=1, C=300, M=2, lengths=(4, 9)),
        Case(B=1, C=200, M=2, norm=False),
        Case(B=1, C=256, T=5, M=1, y=False, normalised=True),
        Case(B=1, C=300, T=12, lengths=(3, 9)),  # the backward takes tokens by two
    ],
)
def test_tiles_of_channels(case, by_tiles):
    cases.check(case, "triton")


@pytest.mark.one_python
@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=8),
        Case(T=12, M=2, lengths=(3, 1, 9)),
        Case(T=8, C=300, M=1, y=False, normalised=True),
    ],
)
def test_tokens_together(case, tokens, monkeypatch):
    """Rows of several shares, each of several groups of tokens."""
    monkeypatch.setattr(
        norm_shift_mix_variants,
        "WHOLE",
        {key: one._replace(tokens=tokens) for key, one in norm_shift_mix_variants.WHOLE.items()},
    )
    cases.check(case, "triton")


def test_without_a_gradient_no_statistics_are_kept():
    case = Case(M=1, y=False)
    arrays, _ = cases.build(case)
    f = lambda arrays: norm_shift_mix(**arrays, implementation="triton").mixed[0]
    kept = f"f32[{case.B},{case.T}]"
    assert kept not in str(jax.make_jaxpr(f)(arrays))
    assert kept in str(jax.make_jaxpr(lambda arrays: jax.vjp(f, arrays)[0])(arrays))


@pytest.mark.one_python
@pytest.mark.parametrize("used", ["mixed", "x"])
def test_no_cotangent_is_read_of_a_sum_that_nothing_depends_on(used, monkeypatch):
    read = []

    def call(kernel, *inputs, **options):
        if kernel.fn.__name__ == "mix_bwd_kernel":
            read.append(inputs[2].x is not None)
        return run.triton_call(kernel, *inputs, **options)

    monkeypatch.setattr(norm_shift_mix_host, "triton_call", call)
    arrays, _ = cases.build(Case(M=1, y=False))

    def loss(arrays, implementation):
        made = norm_shift_mix(**arrays, implementation=implementation)
        return sum(jnp.sum(jnp.square(one)) for one in jax.tree.leaves(getattr(made, used)))

    got, want = (jax.grad(loss)(arrays, implementation) for implementation in ("triton", "xla"))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-4)
    assert read == [used == "x"]


def test_vectors_are_summed_over_rows_together():
    """Each sum is a kernel on a GPU: not one for each of six mixes, scale and bias."""
    arrays, _ = cases.build(Case())

    def gradients(arrays):
        made, pull = jax.vjp(lambda arrays: norm_shift_mix(**arrays, implementation="triton"), arrays)
        return pull(made)

    # over the programs of a row, and over rows
    assert str(jax.make_jaxpr(gradients)(arrays)).count("reduce_sum[") == 2


@pytest.mark.parametrize(
    "bad, reason",
    [
        (dict(M=7), "it takes 1 to 6 mixes, got 7"),
        (dict(B=0), "there are no rows"),
        (dict(dtype="float64"), "float64"),
        (dict(C=16400, T=1, B=1, M=1), "it takes up to 16384 channels, got C = 16400"),
    ],
)
def test_calls_it_cannot_run_say_why(bad, reason):
    with jax.enable_x64(True):
        arrays, _ = cases.build(dataclasses.replace(Case(), **bad))
        with pytest.raises(ValueError, match=f"implementation='triton' cannot run this call: .*{reason}"):
            norm_shift_mix(**arrays, implementation="triton")


@pytest.mark.one_python
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("C", [1, 6, 100, 300, 768, 1024, 2048, 3000, 4096, 8192, 16384])
def test_launches_are_legal(C, dtype, monkeypatch):
    """Warps and channels of a program are powers of two, and tiles cover all channels, for every kernel."""
    launched = []

    def record(kernel, *inputs, out, config, grid, launch):
        launched.append((kernel.fn.__name__, launch.num_warps, config.BC, grid[1]))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), out)

    monkeypatch.setattr(norm_shift_mix_host, "triton_call", record)
    wide, vector = jax.ShapeDtypeStruct((2, 8, C), dtype), jax.ShapeDtypeStruct((C,), "float32")
    for M, moved in ((1, False), (2, True), (6, False)):
        x = dict(x=wide, mixes=[vector] * M, scale=vector, bias=vector)
        x |= {"moves": jax.ShapeDtypeStruct((M, *wide.shape), dtype)} if moved else {}

        def gradient(x):
            out, pull = jax.vjp(lambda x: norm_shift_mix(**x, implementation="triton"), x)
            return pull(out)

        jax.eval_shape(gradient, x)
    assert {"mix_fwd_kernel", "mix_bwd_kernel", "statistics_kernel", "norm_bwd_kernel"} <= {
        name for name, *_ in launched
    }
    for name, warps, channels, tiles in launched:
        assert 1 <= warps <= 32 and warps & (warps - 1) == 0, name
        assert channels & (channels - 1) == 0 and channels * tiles >= C > channels * (tiles - 1), name
