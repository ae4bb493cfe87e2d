"""Configurations and arguments of the models."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.models import RWKV6Config, RWKV7Config, RWKVConfig, RWKVState
from fla_jax.ops import Implementation
from fla_jax.ops.rwkv7.api import CHUNK


def test_configurations_are_values():
    a, b = (RWKV7Config(10, 64, 2, dtype=dtype) for dtype in ("bfloat16", jnp.bfloat16))
    assert a == b and hash(a) == hash(b) and a != dataclasses.replace(a, remat=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.remat = True


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("float32"), jnp.float16])
@pytest.mark.parametrize("cls", [RWKV6Config, RWKV7Config])
def test_configurations_go_through_json(cls, dtype):
    """By `dataclasses.asdict` and by `to_dict`; a dtype is its name, and equal to what was given."""
    config = cls(10, 64, 2, dtype=dtype, scan_layers="unroll", remat=True, decay_low_rank_dim=8)
    assert config.dtype == dtype and dtype == config.dtype and config.dtype == jnp.dtype(dtype)
    assert jnp.zeros(1, config.dtype).dtype == dtype and config.dtype in (jnp.float32, dtype)
    assert config.dtype != jnp.float64 and config.dtype is not None and config.dtype != None  # noqa: E711
    text = json.dumps(dataclasses.asdict(config))
    assert json.loads(text)["dtype"] == jnp.dtype(dtype).name
    assert cls.from_dict(json.loads(text)) == config
    values = json.loads(json.dumps(config.to_dict()))
    again = RWKVConfig.from_dict(values)
    assert again == config and hash(again) == hash(config) and type(again) is cls
    assert values == {"model_type": cls.__name__.removesuffix("Config").lower(), **json.loads(text)}


@pytest.mark.parametrize(
    "cls, change, error, message",
    [
        (RWKV7Config, {"model_type": "rwkv6"}, ValueError, "model_type must be 'rwkv7', got 'rwkv6'"),
        (RWKVConfig, {"model_type": ["rwkv7"]}, ValueError, r"must be 'rwkv6' or 'rwkv7'.*, got \['rw"),
        (RWKVConfig, {"width": 3, 4: 5}, ValueError, "only fields of RWKV7Config, got 4, width"),
        (RWKVConfig, {"dtype": "int8"}, TypeError, "dtype must be a floating-point dtype"),
    ],
)
def test_errors_of_from_dict(cls, change, error, message):
    with pytest.raises(error, match=message):
        cls.from_dict({**RWKV7Config(10, 64, 2).to_dict(), **change})


def test_what_from_dict_needs():
    with pytest.raises(ValueError, match=r"model_type must be 'rwkv6' or 'rwkv7'.*, got None"):
        RWKVConfig.from_dict(dataclasses.asdict(RWKV7Config(10, 64, 2)))
    with pytest.raises(ValueError, match="must have hidden_size, num_layers: RWKV6Config has no"):
        RWKV6Config.from_dict({"vocab_size": 10})
    with pytest.raises(TypeError, match="values must be a mapping such as to_dict makes, got 7"):
        RWKVConfig.from_dict(7)


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
        ({"dtype": None}, TypeError, "dtype must be a floating-point dtype, one of .*, got None"),
        ({"dtype": jnp.float8_e5m2}, TypeError, "dtype must be .* of float16, bfloat16, .*, got float8_e5m2"),
        ({"param_dtype": jnp.complex64}, TypeError, "param_dtype must be a floating-point .*, got complex64"),
        ({"dtype": "float64"}, TypeError, "dtype is float64, which JAX has only with jax_enable_x64 set"),
        ({"param_dtype": float}, TypeError, "param_dtype is float64, which JAX has only with jax_enable_x64"),
        ({"head_dim": 512, "hidden_size": 512}, ValueError, "head_dim must be at most 256, got 512"),
        ({"head_dim": True}, ValueError, "head_dim must be a positive integer, got True"),
        ({"intermediate_size": True}, ValueError, "intermediate_size must be a positive integer, got True"),
        ({"intermediate_size": 64.0}, ValueError, "intermediate_size must be a positive integer, got 64.0"),
        ({"scan_layers": 1}, ValueError, "scan_layers must be False, True or 'unroll', got 1"),
        ({"logical_axes": "no"}, TypeError, "logical_axes must be a bool, got 'no'"),
        ({"remat": 1}, ValueError, "remat must be False, True or 'dense', got 1"),
        ({"remat": None}, ValueError, "remat must be False, True or 'dense', got None"),
        *(
            (
                {"chunk_size": x},
                ValueError,
                f"chunk_size must be a power of two from 1 to 256 or None, got {x}",
            )
            for x in (0, 48, 512, True, 16.0)
        ),
        ({"implementation": "cuda"}, ValueError, "implementation must be .*reference.* or None, got 'cuda'"),
        ({"implementation": ["xla"]}, ValueError, r"implementation must be one of .* or None, got \['xla'\]"),
    ],
)
@pytest.mark.parametrize("cls", [RWKV6Config, RWKV7Config])
def test_configuration_errors(cls, change, error, message):
    with pytest.raises(error, match=message):
        cls(**{"vocab_size": 10, "hidden_size": 64, "num_layers": 2, **change})


def test_what_configurations_take(monkeypatch):
    """Every implementation by name, whether or not it runs here, added ones too; float64 where JAX has it."""
    with pytest.raises(ValueError, match="implementation must be one of"):
        RWKV7Config(10, 64, 2, implementation="mine")
    monkeypatch.setattr(CHUNK, "implementations", [Implementation("mine", object), *CHUNK.implementations])
    assert RWKV7Config(10, 64, 2, implementation="mine").implementation == "mine"
    for name in (None, "reference", "xla", "triton", "pallas"):
        assert RWKV7Config(10, 64, 2, implementation=name).implementation == name
    for size in (None, 1, 16, 256):
        assert RWKV6Config(10, 256, 2, 256, chunk_size=size).chunk_size == size
    with jax.enable_x64(True):
        assert RWKV7Config(10, 64, 2, dtype="float64").dtype == jnp.float64


@pytest.mark.parametrize("rate_scale", [-1, 2.5, "2", True, float("nan")])
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
        ((TOKENS, (jnp.zeros(1),) * 3), TypeError, "state must be an RWKVState.*, got tuple"),
        ((TOKENS, RWKVState(None, None, None)), TypeError, "state.att_shift must be an array, got NoneType"),
        ((TOKENS, RWKVState(*(jnp.zeros(1),) * 3)), ValueError, "state.att_shift must have shape"),
        (
            (TOKENS, small.model(7).init_state(1)),
            ValueError,
            r"att_shift must have shape .*32\], got \[2, 1, 32\]",
        ),
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
    assert (
        state.att_shift.shape == state.ffn_shift.shape == (2, 3, 32) and state.att_shift.dtype == jnp.bfloat16
    )
    for batch in (0, -1, 2.0, None):
        with pytest.raises(ValueError, match="batch must be a positive integer"):
            model.init_state(batch)
