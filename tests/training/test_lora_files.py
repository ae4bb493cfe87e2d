"""Files of LoRA: names, shapes and values of PEFT and RWKV-PEFT, read with safetensors and torch."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from safetensors.numpy import load_file, save_file

from fla_jax.checkpoints import read_pth, write_pth
from fla_jax.models import stack_layers
from fla_jax.training import init_lora, load_lora, save_lora


def made(version=7, *, stacked=False, **options):
    model = small.model(version, scan_layers=stacked)
    params = small.params(small.model(version))
    options = {"rank": 3, "alpha": 6.0, "targets": ("*/att/receptance", "*/ffn/key"), **options}
    lora = init_lora(stack_layers(params) if stacked else params, jax.random.key(0), **options)
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape), x.dtype), lora)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("stacked", [False, True])
def test_peft_directory(tmp_path, stacked):
    model, lora = made(stacked=stacked, dora=True, dropout=0.1)
    save_lora(tmp_path / "adapter", model, lora)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = [f"model.layers.{i}.{name}" for i in range(2) for name in ("attn.r_proj", "ffn.key")]
    ends = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    assert {*tensors} == {f"base_model.model.{module}.{end}" for module in modules for end in ends}
    pair = lora["blocks"]["ffn"]["key"] if stacked else lora["blocks_1"]["ffn"]["key"]
    at = 1 if stacked else ...
    name = "base_model.model.model.layers.1.ffn.key."
    np.testing.assert_array_equal(tensors[name + "lora_A.weight"], np.asarray(pair.a)[at].T)  # [r, in]
    np.testing.assert_array_equal(tensors[name + "lora_B.weight"], np.asarray(pair.b)[at].T)  # [out, r]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    want = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6.0,
        "lora_dropout": 0.1,
        "use_dora": True,
        "bias": "none",
    }
    assert want.items() <= config.items() and {*config["target_modules"]} == {*modules}
    assert_equal(load_lora(tmp_path / "adapter", model), lora)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_rwkv_peft_file(tmp_path, version):
    torch = pytest.importorskip("torch")
    model, lora = made(version)
    save_lora(tmp_path / "lora.pth", model, lora)
    tensors = torch.load(tmp_path / "lora.pth", weights_only=True)
    parts = [f"blocks.{i}.{name}" for i in range(2) for name in ("att.receptance", "ffn.key")]
    assert {*tensors} == {f"{part}.{end}" for part in parts for end in ("lora_A", "lora_B")}
    assert tensors["blocks.1.ffn.key.lora_A"].shape == (3, 32)
    assert_equal(load_lora(tmp_path / "lora.pth", model, alpha=6), lora)


def test_rank_stabilised_scale_and_either_names(tmp_path):
    """PEFT's alpha / sqrt(r), and PEFT around a model with the official names."""
    model, lora = made()
    save_lora(tmp_path, model, lora)
    save_lora(tmp_path / "lora.pth", model, lora)
    official = {f"base_model.model.{name}.weight": x for name, x in read_pth(tmp_path / "lora.pth").items()}
    save_file(official, tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    found = load_lora(tmp_path, model)
    assert found["blocks_0"]["ffn"]["key"].scale == pytest.approx(6 / 3**0.5)
    np.testing.assert_array_equal(found["blocks_0"]["ffn"]["key"].b, lora["blocks_0"]["ffn"]["key"].b)


@pytest.mark.parametrize("stacked", [False, True])
def test_magnitudes_must_be_complete(tmp_path, stacked):
    """Pairs are DoRA's where the configuration says so: without a magnitude they mean another matrix."""
    model, lora = made(stacked=stacked, dora=True)
    save_lora(tmp_path, model, lora)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, options = load_file(weights), json.loads(config.read_text())
    one = "base_model.model.model.layers.1.ffn.key.lora_magnitude_vector"
    path = "blocks/ffn/key" if stacked else "blocks_1/ffn/key"

    def refuses(tensors, use_dora, said):
        save_file(tensors, weights)
        config.write_text(json.dumps(options | {"use_dora": use_dora}))
        with pytest.raises(ValueError, match=said):
            load_lora(tmp_path, model)

    without = {name: x for name, x in tensors.items() if "magnitude" not in name}
    refuses(without, True, "lora_magnitude_vector of blocks.*/att/receptance is missing")
    rest = {name: x for name, x in tensors.items() if name != one}
    refuses(rest, True, f"lora_magnitude_vector of {path} is missing")
    refuses(rest, False, "use_dora must be True for lora_magnitude_vector of blocks.*/att/receptance")
    refuses({**tensors, one: tensors[one][None]}, True, rf"{path} must have shape \[128\], got \[1, 128\]")
    official = {
        f"blocks.{i}.{name}.{end}": tensors[f"base_model.model.model.layers.{i}.{name}.{end}{suffix}"]
        for i, name in ((0, "ffn.key"), (1, "ffn.key"))
        for end, suffix in (("lora_A", ".weight"), ("lora_B", ".weight"), ("lora_magnitude_vector", ""))
    }
    write_pth(tmp_path / "lora.pth", official)
    found = load_lora(tmp_path / "lora.pth", model, alpha=6)
    assert_equal(found, {block: {"ffn": {"key": of["ffn"]["key"]}} for block, of in lora.items()})
    write_pth(
        tmp_path / "lora.pth", {name: x for name, x in official.items() if "1.ffn.key.lora_m" not in name}
    )
    with pytest.raises(ValueError, match=f"lora_magnitude_vector of {path} is missing"):
        load_lora(tmp_path / "lora.pth", model, alpha=6)


def test_errors(tmp_path):
    model, lora = made()
    path, folder = tmp_path / "lora.pth", tmp_path / "adapter"
    save_lora(path, model, lora)
    save_lora(folder, model, lora)
    with pytest.raises(ValueError, match=r"alpha must be given for .*lora\.pth"):
        load_lora(path, model)
    with pytest.raises(ValueError, match="a directory for DoRA"):
        save_lora(path, *made(dora=True))
    mixed = lora | {"blocks_1": made(rank=4)[1]["blocks_1"]}
    with pytest.raises(ValueError, match="lora must have pairs of one rank"):
        save_lora(path, model, mixed)
    for other, name in (
        (small.model(7, scan_layers=True), "blocks_0"),
        (small.model(7, num_layers=1), "blocks_1"),
    ):
        with pytest.raises(ValueError, match=f"projections of the model, got one for {name}/att/receptance"):
            save_lora(folder, other, lora)
    tensors = dict(read_pth(path))
    for change, match in (
        ({"blocks.0.ln1.weight": np.ones(32, np.float32)}, "'blocks.0.ln1.weight' is no LoRA"),
        ({"blocks.7.att.key.lora_A": np.ones((3, 32), np.float32)}, "'blocks.7.att.key.lora_A' is no LoRA"),
        ({"blocks.0.att.key.lora_A": np.ones((3, 32), np.float32)}, "lora_B of blocks_0/att/key is missing"),
        ({"blocks.0.ffn.key.lora_A": np.ones((3, 31), np.float32)}, r"must have shapes \[3, 32\] and"),
    ):
        write_pth(tmp_path / "changed.pth", tensors | change)
        with pytest.raises(ValueError, match=match):
            load_lora(tmp_path / "changed.pth", model, alpha=1)
    write_pth(tmp_path / "few.pth", {name: x for name, x in tensors.items() if ".0." in name})
    with pytest.raises(ValueError, match="in each of the 2 layers"):
        load_lora(tmp_path / "few.pth", small.model(7, scan_layers=True), alpha=1)
    config = json.loads((folder / "adapter_config.json").read_text())
    wrong = {
        "peft_type": "IA3",
        "bias": "all",
        "rank_pattern": {"key": 2},
        "init_lora_weights": "pissa_niter_4",
        "lora_dropout": 1.0,
    }
    for field, value in wrong.items():
        (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match=f"{field} must be"):
            load_lora(folder, model)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has no tensors"):
        load_lora(folder, model)
