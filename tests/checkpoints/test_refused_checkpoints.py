"""Checkpoints that do not fit a model, and models that cannot be saved: errors that name what is wrong."""

from __future__ import annotations

import json
import os

import fla_names as fla
import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small

from fla_jax.checkpoints import load_checkpoint, save_checkpoint, write_pth

ONE = np.ones((2, 2), np.float32)


def changed(z, name, value):
    """The tensors with another value of ``name``: an array, a function of the old one, or None: no tensor."""
    value = value(z[name]) if callable(value) else value
    return {key: x for key, x in z.items() if key != name} | ({} if value is None else {name: value})


# version, name of a tensor, its value, message
ERRORS = [
    (6, "blocks.1.att.time_maa_w2", None, "lacks the tensor 'blocks.1.att.time_maa_w2'"),
    (7, "emb.weight", None, "lacks the tensor 'emb.weight'"),
    (7, "blocks.1.att.v1", None, "lacks the tensor 'blocks.1.att.v1'"),
    (7, "blocks.0.ln0.bias", None, "lacks the tensor 'blocks.0.ln0.bias'"),
    (7, "blocks.1.ffn.key.weight", ONE, r"key.weight' must have shape \[128, 32\], got \[2, 2\]"),
    (7, "blocks.1.att.w1", np.transpose, r"'blocks.1.att.w1' must have shape \[32, 4\], got \[4, 32\]"),
    (6, "blocks.0.att.time_faaaa", ONE[0], r"'blocks.0.att.time_faaaa' has the wrong shape, \[2\]"),
    (6, "blocks.0.att.time_faaaa", np.ones((2, 5), "f4"), "hidden_size must be a multiple of head_dim"),
    (6, "blocks.1.att.ln_x.bias", ONE[0], r"'blocks.1.att.ln_x.bias' must have shape \[32\], got \[2\]"),
    (7, "emb.weight", np.ones((0, 32), "f4"), r"'emb.weight' has no values: its shape is \[0, 32\]"),
    (7, "blocks.1.att.x_z", ONE, "'blocks.1.att.x_z', which RWKV-7 has not: another variant"),
    (7, "blocks.3.att.w1", ONE, "has no tensor of layer 2, but some of layer 3"),
    (7, "model.emb.weight", ONE, "'emb.weight' twice, as 'emb.weight' and as 'model.emb.weight'"),
    (7, "blocks.0.ffn.s_emb.weight", ONE, "'blocks.0.ffn.s_emb.weight' belongs to RWKV-7a"),
    (7, "blocks.0.att.qkv.weight", ONE, "'blocks.0.att.qkv.weight' belongs to RWKV-7b"),
    (7, "emb.weight", np.float64, "' is float64: give param_dtype, or set jax_enable_x64"),
]
OTHER_MODELS = [
    (("emb.weight", "blocks.0.att.time_mix_k"), "'blocks.0.att.time_mix_k' belongs to RWKV-4 or RWKV-5"),
    (("weight",), "its names are not those of a known model; known are RWKV-LM's RWKV-6, "),
    ((), "its names are not those of a known model; known are RWKV-LM's RWKV-6, "),
]


def refuses(path, tensors, message):
    write_pth(path, tensors)
    with pytest.raises(ValueError, match=r"a\.pth: .*" + message):
        load_checkpoint(path)


@pytest.mark.parametrize("version, name, value, message", ERRORS)
def test_refuses(version, name, value, message, tmp_path):
    z = official.file(version, small.params(small.model(version)))
    refuses(tmp_path / "a.pth", changed(z, name, value), message)


@pytest.mark.parametrize("names, message", OTHER_MODELS)
def test_refuses_other_models(names, message, tmp_path):
    refuses(tmp_path / "a.pth", dict.fromkeys(names, ONE), message)


def test_refuses_directories(tmp_path):
    model = small.model(6)
    z = official.file(6, small.params(model))
    names, folder = fla.tensors(6, z, 2), tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        load_checkpoint(folder)
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        load_checkpoint(folder)
    att = "model.layers.1.attn."
    for name, value, message in (
        (f"{att}x_bias", None, r"lacks the tensor 'model.layers.1.attn.x_bias\[\d\]'"),
        (f"{att}x_bias", ONE, "'model.layers.1.attn.x_bias' must have a first axis of 5"),
        (f"{att}g_norm.weight", None, "lacks the tensor 'model.layers.1.attn.g_norm.weight'"),
        ("model.layers.0.attn.x_proj.0.linear.weight", ONE, "linear.weight' has the wrong shape"),
        (f"{att}x_proj.2.weight", ONE, r"x_proj.2.weight' must have shape \[32, 20\], got \[2, 2\]"),
        (f"{att}q_proj.weight", ONE, "q_proj.weight' belongs to a hybrid with softmax attention"),
        ("lm_head.weight", None, "lacks the tensor 'lm_head.weight'"),
        ("lm_head.weight", np.ones((24, 32), np.int8), "'lm_head.weight' has the element type I8"),
    ):
        fla.save(folder, changed(names, name, value))
        with pytest.raises(ValueError, match=rf"{folder}.*{message}"):
            load_checkpoint(folder)
    fla.save(folder, names)
    for field, value in (("norm_eps", 1e-6), ("hidden_act", "gelu")):
        (folder / "config.json").write_text(json.dumps({field: value}))
        with pytest.raises(ValueError, match=f"config.json: {field} must be .*, got"):
            load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no valid JSON"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for end in (0, 4, 200, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated, or no safetensors file"):
            load_checkpoint(folder)


def test_save_errors(tmp_path):
    model = small.model(7)
    params = small.params(model)
    of_dtype = lambda dtype: jax.tree.map(lambda x: x.astype(dtype), params)
    without = {name: value for name, value in params.items() if name != "ln_out"}
    for tree, error, message in (
        (without, ValueError, "params lack ln_out/"),
        ({**params, "more": ONE}, ValueError, "params hold more, which the model has not"),
        (
            {**params, "head": {"kernel": ONE}},
            ValueError,
            r"head/kernel must have shape .*24\], got \[2, 2\]",
        ),
        (of_dtype(jnp.int32), TypeError, "must be an array of float16, .*, got int32"),
        (
            jax.tree.map(lambda x: np.asarray(x, ">f4"), params),
            TypeError,
            "must be an array of float16, .*, got >f4",
        ),
        (of_dtype(jnp.float8_e5m2), TypeError, "must be an array of float16, .*, got float8_e5m2"),
    ):
        with pytest.raises(error, match=message):
            save_checkpoint(tmp_path / "a.pth", model, tree)
    with pytest.raises(
        ValueError,
        match=r"rate_scale must be 1, .*got 2.0: a \.pth file does not store it, format='orbax' does",
    ):
        save_checkpoint(tmp_path / "a.pth", small.model(7, rate_scale=2.0), params)
    with pytest.raises(ValueError, match=r"must name a folder or a .pth file, got .*a\.safet"):
        save_checkpoint(tmp_path / "a.safetensors", model, params)
    with pytest.raises(ValueError, match=r"path must name a folder or a \.pth file, got .*a\.safet"):
        save_checkpoint(tmp_path / "a.safetensors", model, params, format="huggingface")
    assert not os.listdir(tmp_path)
