"""The fast path of decoding on an NVIDIA GPU against the model."""

import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from harness import quantised_products as products

from fla_jax.generation import Decoder, Generator, SamplingParams, sampling
from fla_jax.pallas.backend.triton import INTERPRET

if jax.default_backend() != "gpu" or INTERPRET:
    pytest.skip("no NVIDIA GPU is visible to JAX, or Triton's interpreter is on", allow_module_level=True)

from fla_jax.pallas.decode import projections_host

ROOT = pathlib.Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def setup(version, width=512, layers=4, dtype="float32", vocab=1000):
    model = type(small.model(version))(
        type(small.model(version).config)(vocab, width, layers, dtype=dtype, param_dtype=dtype)
    )
    return model, small.params(model)


@pytest.fixture(scope="module")
def exact():
    """Products in full float32, as the kernels have them."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("version", small.VERSIONS)
@pytest.mark.parametrize("B", [1, 3, 6, 40, 130])
def test_logits_and_states(version, B, exact):
    """Of every way to launch: small batches, tensor cores, the library. An inactive entry keeps its state."""
    model, params = setup(version)
    tokens, active = jnp.arange(B) * 7, jnp.arange(B) != 1
    start = small.random_state(model, B, 1)
    copy = lambda: jax.tree.map(jnp.copy, start)
    fast = Decoder(model, params, implementation="triton")
    want, want_state = Decoder(model, params, implementation="model")(tokens, copy(), active)
    got, state = fast(tokens, copy(), active)
    assert small.error(got[active], want[active]) < 1e-5
    small.assert_close(state, want_state)
    if B > 1:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 1], b[:, 1]), state, start)
    again, _ = fast(tokens, copy(), active)
    np.testing.assert_array_equal(got[active], again[active])  # the same bits


@pytest.mark.parametrize("version", small.VERSIONS)
def test_greedy_tokens_are_the_models(version, exact):
    model, params = setup(version)
    prompts = [[3, 1, 4, 1, 5], [9]]
    found = []
    for name, slots in (("model", 2), ("triton", 2), ("triton", 1)):
        generator = Generator(model, params, slots=slots, implementation=name)
        found.append([one.tokens.tolist() for one in generator.generate(prompts, GREEDY, max_tokens=512)])
    assert found[0] == found[1] == found[2] and [len(tokens) for tokens in found[0]] == [512, 512]


@pytest.mark.parametrize("version", small.VERSIONS)
@pytest.mark.parametrize("B", [1, 8])
def test_bfloat16_is_as_near_as_the_model(version, B):
    """The median over tokens: where a head of the group norm is nearly 0, any form is far off."""
    model, params = setup(version, dtype="bfloat16")
    wide, _ = setup(version)
    texts = np.stack([small.tokens(64, B, seed=seed) for seed in range(4)])

    def logits_of(decoder):
        step, weights = decoder.step, decoder.weights

        def one(state, tokens):
            logits, state = step(weights, tokens, state, jnp.ones(B, bool))
            return state, logits

        read = jax.jit(lambda text: jax.lax.scan(one, decoder.init_state(B), text)[1])
        return np.stack([read(text) for text in texts])

    with jax.default_matmul_precision("highest"):
        params32 = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        want = logits_of(Decoder(wide, params32, implementation="model"))
    error = {}
    for name in ("model", "triton"):
        off = np.square(logits_of(Decoder(model, params, implementation=name)) - want)
        error[name] = np.median(np.sqrt(np.mean(off, -1)))
    assert error["triton"] <= error["model"], error


@pytest.mark.parametrize(
    "options",
    [
        {"state_dtype": "bfloat16"},
        {"state_dtype": "float16"},
        {"weight_dtype": "int8"},
        {"weight_dtype": "int4"},
        {"weight_dtype": "int4", "weight_group": 128},
    ],
)
@pytest.mark.parametrize("B", [1, 2, 8, 40])
def test_options(options, B):
    """The kernels against the same in plain JAX."""
    model, params = setup(7, dtype="bfloat16")
    got, want = (Decoder(model, params, implementation=name, **options) for name in ("triton", "plain"))
    tokens, state = jnp.arange(B), small.random_state(model, B)
    a, _ = got(tokens, jax.tree.map(jnp.copy, state))
    b, _ = want(tokens, jax.tree.map(jnp.copy, state))
    assert small.error(a, b) < 3e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits, group, K", products.PRODUCTS)
def test_products_of_quantised_weights(bits, group, K, dtype):
    """Of one token at three sizes; what is not finite stays so."""
    product = jax.jit(lambda matrix, token: projections_host.project(matrix, token)[0])
    for scale in products.SCALES:
        matrix, token = products.operands(bits, group, K, scale, dtype, N=12800)
        got = product(matrix, token)
        assert products.error(got, matrix, token) < products.bound(bits, group, token), scale
    for bad in (jnp.nan, jnp.inf):
        got = product(matrix, token.at[0, 7].set(bad))
        assert not jnp.isfinite(got).any()


@pytest.mark.parametrize("V", [65536, 50277])
def test_choice_without_sorting(V):
    """64 requests: the tokens that sorting gives, and their counts; the first one alone gets the same."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.normal(size=(64, V)), jnp.float32)
    seen = rng.random((64, V)) < 0.01
    before = sampling.TokenCounts(jnp.asarray(seen), jnp.asarray(seen * rng.random((64, V)), jnp.float32))
    first = sampling.TokenCounts(before.seen[:1], before.count[:1])
    keys = jax.random.split(jax.random.key(0), 64)
    every, banned = SamplingParams(top_p=1.0), tuple(range(0, V, 2))
    for settings in (
        SamplingParams(),
        SamplingParams(top_k=50, temperature=2.0),
        SamplingParams(top_p=0.1, banned=banned),
        every,
        GREEDY,
    ):
        sample = jax.jit(sampling.choose, static_argnums=4)
        rules = settings.arrays(V)
        want, after = sample(rules, logits, before, keys, "xla")
        got, counts = sample(rules, logits, before, keys, "triton")
        same = np.asarray(want == got)
        assert (~same).sum() <= 1  # a sum of probabilities may meet top-p to rounding
        np.testing.assert_array_equal(counts.seen[same], after.seen[same])
        np.testing.assert_allclose(counts.count[same], after.count[same], rtol=1e-6)
        np.testing.assert_array_equal(sample(rules, logits, before, keys, "triton")[0], got)
        np.testing.assert_array_equal(sample(rules, logits[:1], first, keys[:1], "triton")[0], got[:1])


def test_the_state_is_never_copied():
    """Nothing in the compiled loop copies as much as a layer's states."""
    spec = importlib.util.spec_from_file_location("decode_benchmark", ROOT / "benchmarks" / "decode.py")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    options = benchmark.parse(["--quick", "--tokens", "64"])
    model, params = setup(7, dtype="bfloat16")
    for B in (1, 64):
        found = benchmark.token_times(model, params, B, "triton", options)
        assert found["copies"] == 0, found


def test_continuous_batching():
    model, params = setup(7, dtype="bfloat16")
    generator = Generator(model, params, slots=4)
    lengths = [5, 40, 17, 3, 64, 20, 9, 33]
    rules = [SamplingParams(0.8, seed=i, max_tokens=length) for i, length in enumerate(lengths)]
    prompts = [[1 + i, 2, 3][: 1 + i % 3] for i in range(len(lengths))]
    assert [len(one.tokens) for one in generator.generate(prompts, rules)] == lengths
