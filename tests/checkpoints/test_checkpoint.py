"""Models from and to checkpoints, bit by bit; names and shapes as in official.py and fla_names.py."""

from __future__ import annotations

import dataclasses
import json
import os

import fla_names as fla
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import official
import pytest
import small_models as small
from harness.compare import assert_same_bits as same

from fla_jax.checkpoints import load_checkpoint, load_extras, read_pth, save_checkpoint, write_pth
from fla_jax.models import RWKV7Config, unstack_layers

CASES = [
    (6, "float32", {}),
    (6, "bfloat16", {"num_layers": 1, "head_dim": 8}),
    (7, "float32", {}),
    (7, "bfloat16", {"num_layers": 1, "head_dim": 32, "intermediate_size": 40}),
    (7, "float16", {"num_layers": 3}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"rwkv{case[0]}-{case[1]}")
def case(request):
    version, dtype, sizes = request.param
    model = small.model(version, param_dtype=dtype, **sizes)
    params = small.params(model)
    z = official.file(version, params, model.config.param_dtype)
    return version, model, params, z, fla.tensors(version, z, model.config.num_layers)


def complete(config):
    """The configuration as a file tells it: official widths (of 32 channels) written out."""
    v7 = isinstance(config, RWKV7Config)
    unknown = {"v_low_rank_dim": None} if v7 and config.num_layers == 1 else {}
    return dataclasses.replace(
        config, intermediate_size=config.intermediate_size or (128 if v7 else 96), **unknown
    )


def test_official_files(case, tmp_path):
    """Their parameters, their configuration, and the same bits back."""
    _, model, params, z, _ = case
    write_pth(tmp_path / "a.pth", dict(reversed(z.items())))  # the order of tensors means nothing
    got, got_params = load_checkpoint(tmp_path / "a.pth")
    assert type(got) is type(model) and got.config == complete(model.config)
    same(got_params, params)
    save_checkpoint(tmp_path / "b.pth", got, got_params)
    same(read_pth(tmp_path / "b.pth"), z)


def test_fla_directories(case, tmp_path):
    _, model, params, z, names = case
    fla.save(tmp_path / "a", names)
    got, got_params = load_checkpoint(tmp_path / "a")
    assert type(got) is type(model) and got.config == complete(model.config)
    same(got_params, params)
    same(load_checkpoint(tmp_path / "a" / "model.safetensors")[1], params)
    save_checkpoint(tmp_path / "b", got, got_params, format="huggingface")
    same(fla.load(tmp_path / "b"), {name: np.ascontiguousarray(x) for name, x in names.items()})
    # and across, through the other format
    save_checkpoint(tmp_path / "c.pth", *load_checkpoint(tmp_path / "b"))
    same(read_pth(tmp_path / "c.pth"), z)
    assert sorted(os.listdir(tmp_path / "b")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_order_of_tensors(tmp_path):
    """PyPI rwkv takes RWKV-6's number of heads from time_faaaa only after it has met a time_maa."""
    model = small.model(6, num_layers=11)
    save_checkpoint(tmp_path / "a.pth", model, small.params(model))
    names = list(read_pth(tmp_path / "a.pth"))
    assert names.index("emb.weight") == 0 and names.index("blocks.0.att.time_maa_x") < names.index(
        "blocks.0.att.time_faaaa"
    )
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    assert layers == sorted(layers) and {name.split(".")[0] for name in names[-3:]} == {"ln_out", "head"}


def test_config_json(case, tmp_path):
    """Fields that FLA's configurations have, with its names for them."""
    version, model, params, *_ = case
    save_checkpoint(tmp_path, model, params, format="huggingface")
    got, config = json.loads((tmp_path / "config.json").read_text()), complete(model.config)
    want = {
        "architectures": [f"RWKV{version}ForCausalLM"],
        "model_type": f"rwkv{version}",
        "vocab_size": 24,
        "hidden_size": 32,
        "num_hidden_layers": config.num_layers,
        "num_heads": 32 // config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "sqrelu",
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": str(config.param_dtype),
    }
    if version == 6:
        want |= {"expand_k": 1.0, "expand_v": 1.0, "proj_low_rank_dim": 4, "gate_low_rank_dim": 8}
    else:
        want |= {
            "head_dim": config.head_dim,
            "decay_low_rank_dim": 4,
            "a_low_rank_dim": 6,
            "gate_low_rank_dim": 8,
            "value_dim": [32] * config.num_layers,
        }
        want |= {"v_low_rank_dim": 5} if config.num_layers > 1 else {}
    assert {name: got.get(name) for name in want} == want


def test_fla_token_shift_of_rwkv6():
    """What the permuted matrices mean: FLA's formula on its tensors is the official one on those."""
    z = official.file(6, small.params(small.model(6)))
    names, rng = fla.tensors(6, z, 2), np.random.default_rng(0)
    x, d = rng.normal(size=(2, 32))
    p = official.lookup(z, "blocks.1.att.")
    low = np.tanh((x + d * p["time_maa_x"]) @ p["time_maa_w1"]).reshape(5, -1)
    want = {n: p[f"time_maa_{n}"] + low[i] @ p["time_maa_w2"][i] for i, n in enumerate("wkvrg")}
    f = lambda name: names[f"model.layers.1.attn.{name}"]
    low = np.tanh(f("x_proj.0.linear.weight") @ (x + d * f("x_proj.0.mu"))).reshape(5, -1)
    got = np.einsum("nr,hnr->nh", low, f("x_proj.2.weight").reshape(32, 5, -1)) + f("x_bias")
    for i, n in enumerate("rwkvg"):
        np.testing.assert_allclose(got[i], want[n], atol=1e-6)


def test_scanned(case, tmp_path):
    version, model, params, z, _ = case
    write_pth(tmp_path / "a.pth", z)
    got, stacked = load_checkpoint(tmp_path / "a.pth", scan_layers=True)
    assert got.config == dataclasses.replace(complete(model.config), scan_layers=True)
    same(unstack_layers(stacked), params)
    if version == 7:
        assert not any(np.any(np.asarray(stacked["blocks"]["att"][name][0])) for name in ("v0", "v1", "v2"))
    shapes = small.shapes(got, jnp.zeros((1, 1), jnp.int32))
    assert small.kinds(shapes) == small.kinds(stacked)
    save_checkpoint(tmp_path / "b.pth", got, stacked)
    same(read_pth(tmp_path / "b.pth"), z)


def test_options(tmp_path):
    model = small.model(7)
    params = small.params(model)
    save_checkpoint(tmp_path / "a.pth", model, params)
    options = {
        "dtype": "bfloat16",
        "param_dtype": "bfloat16",
        "remat": True,
        "chunk_size": 16,
        "implementation": "reference",
        "logical_axes": True,
    }
    got, got_params = load_checkpoint(tmp_path / "a.pth", **options)
    assert got.config == dataclasses.replace(complete(model.config), **options)
    same(got_params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    for name in ("vocab_size", "rate_scale", "dtpye"):
        with pytest.raises(TypeError, match=f"load_checkpoint takes no option '{name}'"):
            load_checkpoint(tmp_path / "a.pth", **{name: 1})


def test_boxed_parameters(tmp_path):
    model = small.model(6, logical_axes=True)
    rng = np.random.default_rng(0)
    shapes = small.shapes(model, jnp.zeros((1, 2), jnp.int32))
    boxed = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    assert isinstance(boxed["head"]["kernel"], nn.LogicallyPartitioned)
    save_checkpoint(tmp_path / "a.pth", model, boxed)
    same(load_checkpoint(tmp_path / "a.pth")[1], nn.meta.unbox(boxed))


@pytest.mark.parametrize("version", small.VERSIONS)
def test_extras(version, tmp_path):
    """Tuned states and layer 0's v's: neither in the way nor lost."""
    model = small.model(version)
    params = small.params(model)
    rng = np.random.default_rng(0)
    extras = {f"blocks.{i}.att.time_state": rng.normal(size=(2, 16, 16)).astype(np.float32) for i in range(2)}
    if version == 7:
        extras |= {
            f"blocks.0.att.{name}": rng.normal(size=shape).astype(np.float32)
            for name, shape in (("v0", (1, 1, 32)), ("v1", (32, 5)), ("v2", (5, 32)))
        }
    z = {**official.file(version, params), **extras}
    write_pth(tmp_path / "a.pth", z)
    got, got_params = load_checkpoint(tmp_path / "a.pth")
    same(got_params, params)
    same(load_extras(tmp_path / "a.pth"), extras)
    save_checkpoint(tmp_path / "b.pth", got, got_params, extras=load_extras(tmp_path / "a.pth"))
    same(read_pth(tmp_path / "b.pth"), z)
    save_checkpoint(tmp_path / "c.pth", got, got_params)
    assert load_extras(tmp_path / "c.pth") == {}
    with pytest.raises(
        ValueError, match=r"'blocks.0.att.time_state' is no tensor that a Hugging Face directory"
    ):
        save_checkpoint(tmp_path / "d", got, got_params, extras=extras, format="huggingface")
    with pytest.raises(ValueError, match=r"extras: 'emb.weight' is no tensor that a \.pth file may"):
        save_checkpoint(tmp_path / "d.pth", got, got_params, extras={"emb.weight": z["emb.weight"]})
    wrong = {"blocks.1.att.time_state": np.zeros((2, 16, 8), np.float32)}
    with pytest.raises(
        ValueError,
        match=r"1.att.time_state' must have shape .* = \[2, 16, 16\], got \[2, 16, 8\]",
    ):
        save_checkpoint(tmp_path / "d.pth", got, got_params, extras=wrong)
    state, before = extras["blocks.1.att.time_state"], (tmp_path / "c.pth").read_bytes()
    for name, message in (
        ("blocks.2.att.time_state", r"'blocks.2.att.time_state' is of layer 2, and the model has 2"),
        ("blocks.01.att.time_state", r"extras: 'blocks.01.att.time_state' is no tensor"),
    ):
        with pytest.raises(ValueError, match=message):  # no file that cannot be loaded, over one that can
            save_checkpoint(tmp_path / "c.pth", got, got_params, extras={name: state})
    assert (tmp_path / "c.pth").read_bytes() == before
    write_pth(tmp_path / "a.pth", {**z, **wrong})
    with pytest.raises(ValueError, match=r"a\.pth: 'blocks.1.att.time_state' must have shape"):
        load_checkpoint(tmp_path / "a.pth")


def test_variations_in_files(tmp_path):
    """Trainers' prefixes, vectors with and without axes of 1, FLA's older x_x, several files, dtypes."""
    model = small.model(7)
    params = small.params(model)
    z = official.file(7, params)
    for prefix in ("_forward_module.", "model.", "_forward_module.model."):
        write_pth(
            tmp_path / "a.pth",
            {prefix + name: x.reshape(-1) if x.shape[:2] == (1, 1) else x for name, x in z.items()},
        )
        same(load_checkpoint(tmp_path / "a.pth")[1], params)
    names = fla.tensors(7, z, 2)
    old = {name: x for name, x in names.items() if ".attn.x_" not in name}
    old |= {
        f"model.layers.{i}.attn.x_x": np.concatenate(
            [names[f"model.layers.{i}.attn.x_{n}"][0] for n in "rwkvag"]
        )
        for i in range(2)
    }
    fla.save(tmp_path / "old", old)
    same(load_checkpoint(tmp_path / "old")[1], params)

    where = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in names}
    for file in set(where.values()):
        fla.save(tmp_path / "many", {name: x for name, x in names.items() if where[name] == file}, file)
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    same(load_checkpoint(tmp_path / "many")[1], params)
    with pytest.raises(ValueError, match=r"many already holds a model in other files .model-00001-of-00002"):
        save_checkpoint(tmp_path / "many", model, params, format="huggingface")
    (tmp_path / "many" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**where, "x": min(where.values())}})
    )
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors lacks 'x', which"):
        load_checkpoint(tmp_path / "many")
    (tmp_path / "many" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../old/model.safetensors"}})
    )
    with pytest.raises(ValueError, match="must have a weight_map of tensors to files in the same directory"):
        load_checkpoint(tmp_path / "many")

    half = {name: x if name.endswith("w0") else x.astype(ml_dtypes.bfloat16) for name, x in z.items()}
    write_pth(tmp_path / "a.pth", half)
    got, mixed = load_checkpoint(tmp_path / "a.pth")
    assert got.config.param_dtype == jnp.bfloat16 and mixed["blocks_0"]["att"]["w0"].dtype == jnp.float32
    save_checkpoint(tmp_path / "b.pth", got, mixed)
    same(read_pth(tmp_path / "b.pth"), half)
