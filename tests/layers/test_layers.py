"""Single layers: official equations, depth, the op that they call, wrong arguments, low precision."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small

import fla_jax
from fla_jax.layers import (
    RWKV6Attention,
    RWKV6FeedForward,
    RWKV7Attention,
    RWKV7FeedForward,
    RWKVState,
    rwkv6,
    rwkv7,
    token_shift,
)

B, T, C, N = 2, 6, 32, 16
FIELDS = {"hidden_size": C, "num_layers": 3}
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, C)), jnp.float32)
V_FIRST = X[::-1]
STATE = RWKVState(
    X[:, 0], X[:, 1], jnp.asarray(np.random.default_rng(1).normal(size=(B, C // N, N, N)), jnp.float32)
)


def attention(version, layer=1, **options):
    cls = {6: RWKV6Attention, 7: RWKV7Attention}[version]
    fields = {**FIELDS, "head_dim": N, "layer_index": layer, **options}
    return cls(**fields), V_FIRST if layer and version == 7 else None


def drawn(layer, *inputs):
    return small.draw(small.shapes(layer, *inputs))


def squeezed(params):
    z = official.checkpoint({"ln0": {"scale": np.ones(1), "bias": np.ones(1)}, "att": params}, 0)
    return official.lookup(z, "att.")


@pytest.mark.parametrize("version, layer", [(6, 0), (6, 2), (7, 0), (7, 2)])
def test_attention(version, layer):
    att, before = attention(version, layer)
    params = drawn(att, X, STATE, before)
    y, state, v_first = jax.jit(att.apply)({"params": params}, X, STATE, before)
    assert (v_first is None) == (version == 6)
    p = squeezed(params)
    for b in range(B):
        last, S = np.asarray(STATE.att_shift[b], np.float64), np.asarray(STATE.wkv[b], np.float64)
        for t in range(T):
            x = np.asarray(X[b, t], np.float64)
            if version == 6:
                want, S = official.time_mix6(p, x, last, S)
            else:
                want, S, v = official.time_mix7(p, x, last, S, np.asarray(V_FIRST[b, t]), layer)
                assert small.error(v_first[b, t], v) < 1e-5
            last = x
            assert small.error(y[b, t], want) < 1e-5
        assert small.error(state.wkv[b], S) < 1e-5
    np.testing.assert_array_equal(state.att_shift, X[:, -1])
    np.testing.assert_array_equal(state.ffn_shift, STATE.ffn_shift)


@pytest.mark.parametrize(
    "cls, mix", [(RWKV6FeedForward, official.channel_mix6), (RWKV7FeedForward, official.channel_mix7)]
)
def test_feed_forward(cls, mix):
    ffn = cls(**FIELDS)
    params = drawn(ffn, X)
    y, state = jax.jit(ffn.apply)({"params": params}, X, STATE)
    p = squeezed(params)
    for b in range(B):
        xs = np.asarray(jnp.concatenate([STATE.ffn_shift[b : b + 1], X[b]]), np.float64)
        assert small.error(y[b], [mix(p, xs[t + 1], xs[t]) for t in range(T)]) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, state, STATE.replace(ffn_shift=X[:, -1]))
    _, state = ffn.apply({"params": params}, X)
    assert state.att_shift is state.wkv is None and jax.tree.leaves(state)[0].shape == (B, C)


@pytest.mark.parametrize("version, module", [(6, rwkv6), (7, rwkv7)])
def test_which_op_is_called(version, module, monkeypatch):
    calls = []

    def spy(name, op, *args, **kwargs):
        calls.append((name, {**kwargs, "w": args[1 if version == 7 else 3].dtype}))
        return op(*args, **kwargs)

    for name in (f"chunk_rwkv{version}", f"fused_recurrent_rwkv{version}"):
        monkeypatch.setattr(module, name, functools.partial(spy, name, getattr(module, name)))
    att, v_first = attention(version, chunk_size=2, implementation="reference", dtype=jnp.bfloat16)
    for n in (4, 1):
        inputs = X[:, :n], None, None if v_first is None else v_first[:, :n]
        jax.eval_shape(att.init, jax.random.key(0), *inputs)
    (many, options), (one, single) = calls
    assert (many, one) == (f"chunk_rwkv{version}", f"fused_recurrent_rwkv{version}")
    assert options["chunk_size"] == 2 and options["implementation"] == single["implementation"] == "reference"
    assert options.get("lower_bound") == (-0.61 if version == 7 else None)
    assert options["w"] == single["w"] == jnp.bfloat16  # made in float32, rounded once for the op


@pytest.fixture(scope="module", params=small.VERSIONS)
def initial(request):
    model = small.model(request.param, scan_layers=True)
    return request.param, jax.jit(model.init)(jax.random.key(0), small.tokens(1, 1))["params"]


@pytest.mark.parametrize(
    "param_dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=(pytest.mark.slow, pytest.mark.one_python))]
)
def test_bfloat16_is_finite_at_initialisation(initial, param_dtype):
    """Whole models, also for a repeated token, whose token shift is all zero."""
    version, params = initial
    model = small.model(
        version, scan_layers=True, dtype=jnp.bfloat16, param_dtype=param_dtype, implementation="reference"
    )
    tokens = small.tokens(2, 6).at[1].set(3)
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    made = small.shapes(model, tokens)
    assert small.kinds(made) == small.kinds(params)

    def loss(params, state):
        logits, state = model.apply({"params": params}, tokens, state)
        assert (
            logits.dtype == jnp.float32
            and state.wkv.dtype == jnp.float32
            and state.att_shift.dtype == jnp.bfloat16
        )
        return jnp.mean(jax.nn.logsumexp(logits, -1)) + sum(
            jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(state)
        )

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, model.init_state(2))
    assert np.isfinite(value)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("version", small.VERSIONS)
def test_bfloat16_is_near_float32(version):
    params = small.params(small.model(version))
    tokens = small.tokens(2, 8)
    run = lambda dtype: jax.jit(small.model(version, dtype=dtype, implementation="reference").apply)
    full, half = (run(dtype)({"params": params}, tokens)[0] for dtype in (jnp.float32, jnp.bfloat16))
    assert 1e-4 < np.sqrt(np.mean((full - half) ** 2)) / np.std(full) < 0.05


def test_token_shift():
    x = jnp.arange(1.0, 11.0).reshape(2, 5, 1)
    last = jnp.array([[-1.0], [-2.0]])
    np.testing.assert_array_equal(token_shift(x, last)[..., 0], [[-1, 1, 2, 3, 4], [-2, 6, 7, 8, 9]])
    ids = jnp.array([[5, 5, 0, 0, 5], [1, 2, 3, 3, 3]])
    np.testing.assert_array_equal(token_shift(x, last, ids)[..., 0], [[-1, 1, 0, 3, 0], [-2, 0, 0, 8, 9]])


def test_promises_to_the_op_hold():
    """The checked mode looks at the decay's sign and lower bound, and at the growth of the state."""
    att, v_first = attention(7, rate_scale=2.0, implementation="reference")
    params = jax.tree.map(lambda x: 5 * x, drawn(att, X, None, v_first))
    fla_jax.checked(lambda p: att.apply({"params": p}, X, None, v_first)[0])(params)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": X[0]}, ValueError, "x must have shape"),
        ({"x": X[..., :-1]}, ValueError, "x must have shape"),
        ({"x": X.astype(jnp.int32)}, TypeError, "x must have a floating-point dtype"),
        ({"x": X[:, :0]}, ValueError, "T = 0"),
        ({"head_dim": 5}, ValueError, "hidden_size must be a multiple of head_dim"),
        ({"state": STATE.replace(wkv=STATE.wkv[:1])}, ValueError, "state.wkv must have shape"),
        ({"state": STATE.replace(att_shift=X)}, ValueError, "state.att_shift must have shape"),
        ({"state": (X, X)}, TypeError, "state must be an RWKVState"),
        ({"segment_ids": jnp.zeros((B, T + 1), jnp.int32)}, ValueError, "segment_ids must have shape"),
        ({"segment_ids": jnp.zeros((B, T))}, TypeError, "segment_ids must be an integer array, got float32"),
        ({"implementation": "nope"}, ValueError, "implementation must be one of"),
        ({"chunk_size": 3}, ValueError, "chunk_size must be a power of two"),
        ({"v_first": None}, ValueError, "v_first must be given"),
        ({"x": [[0.0]]}, TypeError, "x must be a floating-point array, got list"),
        ({"segment_ids": [[0]]}, TypeError, "segment_ids must be an integer array, got list"),
        ({"v_first": X[:, :-1]}, ValueError, "v_first must have shape"),
        ({"rate_scale": -1}, ValueError, "rate_scale must be"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    names = ("x", "state", "v_first", "segment_ids")
    inputs = {
        "x": X,
        "state": STATE,
        "v_first": V_FIRST,
        "segment_ids": None,
        **{k: v for k, v in change.items() if k in names},
    }
    fields = {k: v for k, v in change.items() if k not in names}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: attention(7, **fields)[0].init(jax.random.key(0), **inputs))


def test_rwkv6_takes_no_v_first():
    with pytest.raises(ValueError, match="v_first must be None"):
        attention(6)[0].init(jax.random.key(0), X, STATE, V_FIRST)


@pytest.mark.parametrize(
    "state, error, message",
    [
        (STATE.replace(ffn_shift=X), ValueError, "state.ffn_shift must have shape"),
        (STATE.replace(ffn_shift=None), TypeError, "state.ffn_shift must be an array, got NoneType"),
        (X[:, 0], TypeError, "state must be an RWKVState"),
    ],
)
def test_feed_forward_errors(state, error, message):
    with pytest.raises(error, match=message):
        RWKV7FeedForward(**FIELDS).init(jax.random.key(0), X, state)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"hidden_size": 16.0}, ValueError, "hidden_size must be a positive integer, got 16.0"),
        ({"num_layers": 0}, ValueError, "num_layers must be a positive integer, got 0"),
        ({"layer_index": 2, "num_layers": 2}, ValueError, "layer_index must be .* num_layers - 1 = 1, got 2"),
        ({"layer_index": -1}, ValueError, "layer_index must be an integer from 0 .* got -1"),
        ({"layer_index": True}, ValueError, "layer_index must be an integer from 0 .* got True"),
        ({"head_dim": 512, "hidden_size": 512}, ValueError, "head_dim must be at most 256, got 512"),
        ({"dtype": jnp.int32}, TypeError, "dtype must be a floating-point dtype"),
        ({"param_dtype": None}, TypeError, "param_dtype must be a floating-point dtype"),
        ({"logical_axes": 1}, TypeError, "logical_axes must be a bool, got 1"),
        ({"implementation": "cuda"}, ValueError, "implementation must be one of"),
        ({"chunk_size": 48}, ValueError, "chunk_size must be a power of two"),
        ({"decay_low_rank_dim": 0}, ValueError, "decay_low_rank_dim must be a positive integer, got 0"),
    ],
)
@pytest.mark.parametrize("cls", [RWKV6Attention, RWKV7Attention])
def test_fields_are_checked_when_a_layer_is_made(cls, change, error, message):
    with pytest.raises(error, match=message):
        cls(**{**FIELDS, "head_dim": N, **change})


def test_fields_of_feed_forwards_are_checked():
    with pytest.raises(ValueError, match="intermediate_size must be a positive integer, got '64'"):
        RWKV7FeedForward(**FIELDS, intermediate_size="64")
