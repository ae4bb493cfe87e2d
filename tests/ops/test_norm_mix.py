"""Norm, token shift and mixes in plain JAX: half precision, vmap, errors."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases
from harness.cases import MixCase

from fla_jax.ops.layer import norm_shift_mix


def layers_today(floats, dtype):
    """What flax's layer norm, the shift and the mixes give in ``dtype``, each operation rounded."""
    total = floats["x"] + floats["y"]
    norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=dtype)
    h = norm.apply({"params": {"scale": floats["scale"], "bias": floats["bias"]}}, total)
    difference = jnp.concatenate([floats["last"][:, None], h[:, :-1]], 1) - h
    mixed = jnp.stack([h + difference * mu.astype(dtype) for mu in floats["mixes"]])
    return {"mixed": mixed, "last": h[:, -1], "x": total}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_operation_by_operation(dtype):
    case = MixCase(B=2, T=64, C=96, dtype=dtype)
    x, want = cases.build(case), cases.expected(case)
    made, pull = jax.vjp(lambda floats: layers_today(floats, dtype), jax.tree.map(jnp.asarray, x.arrays))
    plain = jax.device_get(cases.Results(made, pull(x.cotangents)[0]))
    theirs, ours = case.errors(plain, want), case.errors(cases.run(case), want)
    wrong = {n: (ours[n], theirs[n]) for n in ours if ours[n][0] > 1.2 * theirs[n][0] + 1e-7}
    assert not wrong, wrong


@pytest.mark.parametrize("jit", [False, True], ids=["", "jitted"])
def test_small_numbers_of_float16(jit):
    """Those below 6e-5 have fewer digits, in sums and in gradients, and are not 0."""
    x, y, dy = (1e-5 * np.random.default_rng(0).standard_normal((3, 1, 9, 16))).astype(np.float16)
    mu = np.full(16, 0.5, np.float32)

    def run(x, y, dy):
        made, pull = jax.vjp(lambda x, y: norm_shift_mix(x, [mu], y=y, implementation="xla"), x, y)
        return made, pull(jax.tree.map(jnp.zeros_like, made)._replace(x=dy))

    made, grads = (jax.jit(run) if jit else run)(x, y, dy)
    total = (x.astype(np.float64) + y.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(made.x, total)
    before = np.pad(total.astype(np.float64), ((0, 0), (1, 0), (0, 0)))
    np.testing.assert_allclose(made.mixed[0], (before[:, :-1] + before[:, 1:]) / 2, atol=2.0**-25, rtol=0)
    chex.assert_trees_all_equal(grads, (dy, dy))


@pytest.mark.parametrize("cut", [1, 5])
def test_a_text_in_two_calls(cut):
    """The second call begins with the first one's ``last``."""
    x = cases.build(MixCase(B=2, T=9, M=3)).arrays
    rest = {name: x[name] for name in ("mixes", "scale", "bias")}
    whole = norm_shift_mix(**x)
    one = norm_shift_mix(x["x"][:, :cut], y=x["y"][:, :cut], last=x["last"], **rest)
    two = norm_shift_mix(x["x"][:, cut:], y=x["y"][:, cut:], last=one.last, **rest)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), (one.mixed, one.x), (two.mixed, two.x))
    chex.assert_trees_all_close(joined, (whole.mixed, whole.x), rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(two.last, whole.last, rtol=1e-6, atol=1e-6)


def test_an_empty_batch():
    made = norm_shift_mix(jnp.ones((0, 2, 3)), [jnp.ones(3)], scale=jnp.ones(3), bias=jnp.ones(3))
    assert made.mixed[0].shape == (0, 2, 3) and made.last.shape == (0, 3)


x, c = np.ones((2, 3, 4), np.float32), np.ones(4, np.float32)
REFUSED = [
    (dict(x=c), ValueError, r"x must have shape \[B, T, C\], got \[4\]"),
    (dict(x=x[:, :0]), ValueError, "x must have at least one token"),
    (dict(x=x.astype(np.int32)), TypeError, "x must have a floating-point dtype, got int32"),
    (dict(mixes=()), ValueError, "mixes must have at least one array"),
    (dict(mixes=[c, None]), TypeError, r"mixes\[1\] must be a floating-point array, got NoneType"),
    (dict(mixes=[c, c[:3]]), ValueError, r"mixes\[1\] must have shape \[C\] = \[4\], got \[3\]"),
    (dict(y=x[:1]), ValueError, r"y must have shape \[B, T, C\] = \[2, 3, 4\], got \[1, 3, 4\]"),
    (dict(y=x.astype(np.float16)), TypeError, "y must have the dtype of x, float32, got float16"),
    (dict(scale=c), ValueError, "scale and bias of the norm must be given together"),
    (dict(scale=c, bias=x), ValueError, r"bias must have shape \[C\] = \[4\]"),
    (dict(last=x), ValueError, r"last must have shape \[B, C\] = \[2, 4\]"),
    (dict(mix_delta=x), ValueError, r"mix_delta must have shape \[M, B, T, C\] = \[1, 2, 3, 4\]"),
    (dict(segment_ids=np.ones((3, 2), int)), ValueError, r"segment_ids must have shape \[B, T\] = \[2, 3\]"),
    (dict(segment_ids=np.ones((2, 3))), TypeError, "segment_ids must be an integer array"),
    (dict(eps=-1e-5), ValueError, "eps must be >= 0, got -1e-05"),
    (dict(eps="1e-5"), ValueError, "eps must be a finite number, got '1e-5'"),
    (dict(implementation="cuda"), ValueError, "implementation must be one of"),
]


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        norm_shift_mix(**dict(x=x, mixes=[c]) | change)


@pytest.mark.parametrize("name", ["mixes", "scale", "last"])
def test_grad_of_vmap_over_one_argument(name):
    cases.check_grad_of_vmap(MixCase(B=1, T=5, C=6, M=2, y=False, normalised=True), name, 1e-6)
