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


def changed(z, name, value=None):
    z = dict(z)
    if value is None:
        del z[name]
    else:
        z[name] = value
    return z


ONE = np.ones((2, 2), np.float32)
ERRORS = [
    (6, lambda z: changed(z, "blocks.1.att.time_maa_w2"), "lacks the tensor 'blocks.1.att.time_maa_w2'"),
    (7, lambda z: changed(z, "emb.weight"), "lacks the tensor 'emb.weight'"),
    (7, lambda z: changed(z, "blocks.1.att.v1"), "lacks the tensor 'blocks.1.att.v1'"),
    (7, lambda z: changed(z, "blocks.0.ln0.bias"), "lacks the tensor 'blocks.0.ln0.bias'"),
    (
        7,
        lambda z: changed(z, "blocks.1.ffn.key.weight", ONE),
        r"'blocks.1.ffn.key.weight' must have shape \[128, 32\], got \[2, 2\]",
    ),
    (
        7,
        lambda z: changed(z, "blocks.1.att.w1", z["blocks.1.att.w1"].T),
        r"'blocks.1.att.w1' must have shape \[32, 4\], got \[4, 32\]",
    ),
    (
        6,
        lambda z: changed(z, "blocks.0.att.time_faaaa", ONE[0]),
        r"'blocks.0.att.time_faaaa' has the wrong shape, \[2\]",
    ),
    (
        6,
        lambda z: changed(z, "blocks.0.att.time_faaaa", np.ones((2, 5), np.float32)),
        "hidden_size must be a multiple of head_dim",
    ),
    (
        6,
        lambda z: changed(z, "blocks.1.att.ln_x.bias", ONE[0]),
        r"'blocks.1.att.ln_x.bias' must have shape \[32\], got \[2\]",
    ),
    (
        7,
        lambda z: changed(z, "emb.weight", np.ones((0, 32), np.float32)),
        r"'emb.weight' has no values: its shape is \[0, 32\]",
    ),
    (
        7,
        lambda z: changed(z, "blocks.1.att.x_z", ONE),
        "holds the tensor 'blocks.1.att.x_z', which RWKV-7 has not: another variant",
    ),
    (7, lambda z: changed(z, "blocks.3.att.w1", ONE), "has no tensor of layer 2, but some of layer 3"),
    (
        7,
        lambda z: changed(z, "model.emb.weight", z["emb.weight"]),
        "holds 'emb.weight' twice, as 'emb.weight' and as 'model.emb.weight'",
    ),
    (
        7,
        lambda z: changed(z, "blocks.0.ffn.s_emb.weight", ONE),
        "'blocks.0.ffn.s_emb.weight' belongs to RWKV-7a",
    ),
    (7, lambda z: changed(z, "blocks.0.att.qkv.weight", ONE), "'blocks.0.att.qkv.weight' belongs to RWKV-7b"),
    (
        6,
        lambda z: {"emb.weight": ONE, "blocks.0.att.time_mix_k": ONE},
        "'blocks.0.att.time_mix_k' belongs to RWKV-4 or RWKV-5",
    ),
    (6, lambda z: {"weight": ONE}, "its names are not those of a known model; known are RWKV-LM's RWKV-6, "),
    (6, lambda z: {}, "its names are not those of a known model; known are RWKV-LM's RWKV-6, "),
    (
        7,
        lambda z: {name: x.astype(np.float64) for name, x in z.items()},
        "' is float64: give param_dtype, or set jax_enable_x64",
    ),
]


@pytest.mark.parametrize("version, change, message", ERRORS)
def test_refuses(version, change, message, tmp_path):
    model = small.model(version)
    write_pth(tmp_path / "a.pth", change(official.file(version, small.params(model))))
    with pytest.raises(ValueError, match=r"a\.pth: .*" + message):
        load_checkpoint(tmp_path / "a.pth")


def test_refuses_directories(tmp_path):
    model = small.model(6)
    z = official.file(6, small.params(model))
    names, folder = fla.tensors(6, z, 2), tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        load_checkpoint(folder)
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        load_checkpoint(folder)
    for change, message in (
        (
            lambda t: changed(t, "model.layers.1.attn.x_bias"),
            r"lacks the tensor 'model.layers.1.attn.x_bias\[\d\]'",
        ),
        (
            lambda t: changed(t, "model.layers.1.attn.x_bias", ONE),
            "'model.layers.1.attn.x_bias' must have a first axis of 5",
        ),
        (
            lambda t: changed(t, "model.layers.1.attn.g_norm.weight"),
            "lacks the tensor 'model.layers.1.attn.g_norm.weight'",
        ),
        (
            lambda t: changed(t, "model.layers.0.attn.x_proj.0.linear.weight", ONE),
            "'model.layers.0.attn.x_proj.0.linear.weight' has the wrong shape",
        ),
        (
            lambda t: changed(t, "model.layers.1.attn.x_proj.2.weight", ONE),
            r"'model.layers.1.attn.x_proj.2.weight' must have shape \[32, 20\], got \[2, 2\]",
        ),
        (
            lambda t: changed(t, "model.layers.1.attn.q_proj.weight", ONE),
            "q_proj.weight' belongs to a hybrid with softmax attention",
        ),
        (lambda t: changed(t, "lm_head.weight"), "lacks the tensor 'lm_head.weight'"),
        (
            lambda t: changed(t, "lm_head.weight", np.ones((24, 32), np.int8)),
            "'lm_head.weight' has the element type I8",
        ),
    ):
        fla.save(folder, change(names))
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
    without = {name: value for name, value in params.items() if name != "ln_out"}
    for tree, error, message in (
        (without, ValueError, "params lack ln_out/"),
        ({**params, "more": ONE}, ValueError, "params hold more, which the model has not"),
        (
            {**params, "head": {"kernel": ONE}},
            ValueError,
            r"params: head/kernel must have shape \[32, 24\], got \[2, 2\]",
        ),
        (
            jax.tree.map(lambda x: x.astype(jnp.int32), params),
            TypeError,
            "params: .* must be an array of float16, .*, got int32",
        ),
        (
            jax.tree.map(lambda x: x.astype(jnp.float8_e5m2), params),
            TypeError,
            "params: .* must be an array of float16, .*, got float8_e5m2",
        ),
    ):
        with pytest.raises(error, match=message):
            save_checkpoint(tmp_path / "a.pth", model, tree)
    with pytest.raises(ValueError, match="rate_scale must be 1, that of official models, got 2"):
        save_checkpoint(tmp_path / "a.pth", small.model(7, rate_scale=2.0), params)
    with pytest.raises(
        ValueError, match=r"path must name an FLA directory or a .pth file, got .*a\.safetensors"
    ):
        save_checkpoint(tmp_path / "a.safetensors", model, params)
    assert not os.listdir(tmp_path)
