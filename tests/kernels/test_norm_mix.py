"""The kernels of norm, shift and mixes in Triton's interpreter, float32, against the float64 reference."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, tiers, variants
from harness.cases import MIX_CASES, MixCase

from fla_jax.core.context import Context
from fla_jax.core.gpu import GPUS
from fla_jax.core.types import Mix, MixInputs
from fla_jax.ops.layer import norm_shift_mix
from fla_jax.ops.layer.norm_mix import NORM_SHIFT_MIX
from fla_jax.pallas.backend import triton

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not triton.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set: tests/gpu runs the kernels themselves", allow_module_level=True)

from fla_jax.pallas.common.select import select
from fla_jax.pallas.layer import norm_shift_mix_host, norm_shift_mix_variants

BLOCKS = "mix: token blocks of 4"  # eleven tokens are three blocks


def arrays_of(case: MixCase) -> dict:
    x = cases.build(case)
    return x.arrays | x.layout | {"mixes": tuple(x.arrays["mixes"])}


@pytest.mark.one_python
@pytest.mark.parametrize(
    "case",
    tiers.first(
        [
            MIX_CASES["everything"],
            MIX_CASES["one token"],
            MixCase(B=1, C=300, M=2, lengths=(4, 9)),
            MixCase(B=1, C=200, M=2, norm=False),
            MixCase(B=1, C=256, T=5, M=1, y=False, normalised=True),
            MixCase(B=1, C=300, T=12, lengths=(3, 9)),  # the backward takes tokens by two
        ],
        2,
    ),
)
def test_tiles_of_channels(case):
    with variants.forced(BLOCKS, "mix: tiles of 128 channels"):
        cases.check(case, "triton")


@pytest.mark.one_python
def test_tiles_of_channels_round_gradients_once():
    """A cotangent that all channels share cancels in the norm's gradient: dh has more than 16 bits."""
    case = MixCase(B=1, C=200, T=6, M=2, dtype="float16")
    x = cases.build(case)
    x.cotangents["mixed"] += np.float16(64)
    x.arrays["scale"][:] = 1
    with variants.forced(BLOCKS, "mix: tiles of 128 channels"):
        got, want = cases.run(case, "triton", x), case.oracle(x)
    assert cases.error_of(got.grads["x"], want.grads["x"]) < 1e-5


@pytest.mark.one_python
@pytest.mark.parametrize("tokens", tiers.first([2, 4]))
@pytest.mark.parametrize(
    "case",
    [MixCase(T=8), MixCase(T=12, M=2, lengths=(3, 1, 9)), MixCase(T=8, C=300, M=1, y=False, normalised=True)],
)
def test_tokens_together(case, tokens):
    """Several blocks of tokens, each of several groups."""
    with variants.forced(BLOCKS, f"mix: {tokens} tokens"):
        cases.check(case, "triton")


def test_without_a_gradient_no_statistics_are_stored():
    case = MixCase(M=1, y=False)
    f = lambda arrays: norm_shift_mix(**arrays, implementation="triton").mixed[0]
    stored = f"f32[{case.B},{case.T}]"
    assert stored not in str(jax.make_jaxpr(f)(arrays_of(case)))
    assert stored in str(jax.make_jaxpr(lambda arrays: jax.vjp(f, arrays)[0])(arrays_of(case)))


@pytest.mark.one_python
@pytest.mark.parametrize("used", ["mixed", "x"])
def test_the_cotangent_of_an_unused_sum_is_not_read(used, monkeypatch):
    read = []

    def call(kernel, *inputs, **options):
        if kernel.fn.__name__ == "mix_bwd_kernel":
            _x, _stats, cotangents, _dims = inputs
            read.append(cotangents.x is not None)
        return triton.triton_call(kernel, *inputs, **options)

    monkeypatch.setattr(norm_shift_mix_host, "triton_call", call)

    def loss(arrays, implementation):
        made = norm_shift_mix(**arrays, implementation=implementation)
        return sum(jnp.sum(jnp.square(one)) for one in jax.tree.leaves(getattr(made, used)))

    arrays = arrays_of(MixCase(M=1, y=False))
    with cases.fresh_traces():
        got, want = (jax.grad(loss)(arrays, implementation) for implementation in ("triton", "xla"))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-4)
    assert read == [used == "x"]


def test_vectors_are_summed_over_the_batch_together():
    """Each sum is a kernel on a GPU: not one for each of six mixes, scale and bias."""

    def gradients(arrays):
        made, pull = jax.vjp(lambda arrays: norm_shift_mix(**arrays, implementation="triton"), arrays)
        return pull(made)

    # over blocks of tokens, and over the batch
    with variants.forced(BLOCKS):
        assert str(jax.make_jaxpr(gradients)(arrays_of(MixCase()))).count("reduce_sum[") == 2


@pytest.mark.parametrize(
    "case, reason",
    [
        (MixCase(M=7), "it takes 1 to 6 mixes, got 7"),
        (MixCase(B=0), "the batch is empty"),
        (MixCase(dtype="float64"), "float64"),
        (MixCase(C=16400, T=1, B=1, M=1), "it takes up to 16384 channels, got C = 16400"),
    ],
)
def test_calls_it_cannot_run_say_why(case, reason):
    message = f"implementation='triton' cannot run this call: .*{reason}"
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        norm_shift_mix(**arrays_of(case), implementation="triton")


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
        x |= {"mix_delta": jax.ShapeDtypeStruct((M, *wide.shape), dtype)} if moved else {}

        def gradient(x):
            out, pull = jax.vjp(lambda x: norm_shift_mix(**x, implementation="triton"), x)
            return pull(out)

        jax.eval_shape(gradient, x)
    kernels = {"mix_fwd_kernel", "mix_bwd_kernel", "statistics_kernel", "norm_bwd_kernel"}
    assert kernels <= {name for name, *_ in launched}
    for name, warps, channels, tiles in launched:
        assert 1 <= warps <= 32 and warps & (warps - 1) == 0, name
        assert channels & (channels - 1) == 0 and channels * tiles >= C > channels * (tiles - 1), name


@pytest.mark.parametrize(
    "C, M, dtype, moved, want",
    [
        (1024, 6, "bfloat16", False, "forward whole, backward whole"),
        (4096, 6, "bfloat16", False, "forward whole, backward tiles"),
        (8192, 2, "bfloat16", False, "forward whole, backward tiles"),
        (8192, 6, "bfloat16", False, "forward tiles, backward tiles"),
        (2048, 2, "float32", False, "forward whole_fp32, backward whole_fp32"),
        (1024, 2, "float32", True, "forward tiles_fp32, backward tiles_fp32"),
    ],
)
def test_a_message_names_the_variants(C, M, dtype, moved, want):
    x, vector = jax.ShapeDtypeStruct((2, 8, C), dtype), jax.ShapeDtypeStruct((C,), "float32")
    mix_delta = jax.ShapeDtypeStruct((M, 2, 8, C), dtype) if moved else None
    inputs = MixInputs(x, (vector,) * M, scale=vector, bias=vector, mix_delta=mix_delta)
    for gpu in GPUS.values():
        said = NORM_SHIFT_MIX.explain(Context("norm_shift_mix", inputs, Mix(), "gpu", gpu))
        assert f"triton ({want}, for {C} channels and {M} mixes)" in said


def test_the_table_has_every_launch_that_variants_can_take():
    key = norm_shift_mix_variants.MixKey(GPUS[90], "fwd", "few", 1, True, True, False)
    for name, mixes, C, is_16bit, has_norm in itertools.product(
        ("fwd", "bwd"), ("few", "many"), (1, 100, 1024, 2048, 3000, 8192, 16384), (True, False), (True, False)
    ):
        one = dataclasses.replace(key, name=name, mixes=mixes, C=C, is_16bit=is_16bit, has_norm=has_norm)
        variant = select(norm_shift_mix_variants.VARIANTS, one)
        if variant.is_whole:
            assert norm_shift_mix_variants.whole_launch(variant, one).channels == one.padded_C
        else:
            kernels = ("sums", "norm") if name == "bwd" and has_norm else (name,)
            assert all(norm_shift_mix_variants.tile_launch(variant, kernel, one).warps for kernel in kernels)
