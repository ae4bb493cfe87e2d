"""Configurations and arguments of the models."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import small_models as small

from fla_jax.models import RWKV6Config, RWKV7Config, RWKVState


def test_configurations_are_values():
    a, b = (RWKV7Config(10, 64, 2, dtype=dtype) for dtype in ("bfloat16", jnp.bfloat16))
    assert a == b and hash(a) == hash(b) and a != dataclasses.replace(a, remat=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.remat = True


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"hidden_size": 60}, ValueError, "hidden_size must be a multiple of head_dim"),
        ({"num_layers": 0}, ValueError, "num_layers must be a positive integer"),
        ({"remat": "all"}, ValueError, "remat must be False, True or 'dense'"),
        ({"vocab_size": 10.0}, ValueError, "vocab_size must be a positive integer"),
        ({"head_dim": -1}, ValueError, "head_dim must be a positive integer"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size must be a positive integer"),
        ({"decay_low_rank_dim": "x"}, ValueError, "decay_low_rank_dim must be a positive integer"),
        ({"dtype": jnp.int32}, TypeError, "dtype must be a floating-point dtype"),
        ({"param_dtype": "nope"}, TypeError, "param_dtype must be a floating-point dtype"),
    ],
)
@pytest.mark.parametrize("cls", [RWKV6Config, RWKV7Config])
def test_configuration_errors(cls, change, error, message):
    with pytest.raises(error, match=message):
        cls(**{"vocab_size": 10, "hidden_size": 64, "num_layers": 2, **change})


@pytest.mark.parametrize("rate_scale", [-1, 2.5, "2"])
def test_rate_scale(rate_scale):
    with pytest.raises(ValueError, match="rate_scale must be"):
        RWKV7Config(10, 64, 2, rate_scale=rate_scale)


TOKENS = jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((jnp.zeros((2, 3)),), TypeError, "tokens must be an integer array, got float32"),
        (([[1, 2]],), TypeError, "tokens must be an integer array, got list"),
        ((TOKENS[0],), ValueError, r"tokens must have shape \[B, T\]"),
        ((TOKENS[:, :0],), ValueError, r"tokens must have shape \[B, T\] with B, T >= 1, got \[2, 0\]"),
        ((TOKENS, None, TOKENS[:1]), ValueError, "segment_ids must have the shape of tokens"),
        ((TOKENS, None, TOKENS * 1.0), TypeError, "segment_ids must be an integer array"),
        ((TOKENS, "zero"), TypeError, "state must be an RWKVState"),
        ((TOKENS, RWKVState(*(jnp.zeros(1),) * 3)), ValueError, "state.att_shift must have shape"),
        ((TOKENS, small.model(7).init_state(1)), ValueError, r"state.att_shift must have shape \[2, 2, 32\], got \[2, 1, 32\]"),
    ],
)
@pytest.mark.parametrize("version", small.VERSIONS)
def test_call_errors(version, args, error, message):
    model = small.model(version)
    with pytest.raises(error, match=message):
        model.init(jax.random.key(0), *args)


def test_init_state():
    model = small.model(7, dtype=jnp.bfloat16)
    state = model.init_state(3)
    assert state.wkv.shape == (2, 3, 2, 16, 16) and state.wkv.dtype == jnp.float32
    assert state.att_shift.shape == state.ffn_shift.shape == (2, 3, 32) and state.att_shift.dtype == jnp.bfloat16
    for batch in (0, -1, 2.0, None):
        with pytest.raises(ValueError, match="batch must be a positive integer"):
            model.init_state(batch)
