"""The library's own checkpoints: every field and bit, on any mesh, in shards, replaced when complete."""

from __future__ import annotations

import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_models as small
from harness import processes
from harness.compare import assert_same_bits as same

from fla_jax import __version__
from fla_jax.checkpoints import load_checkpoint, load_extras, save_checkpoint
from fla_jax.generation import load_tokenizer
from fla_jax.models import stack_layers

OTHER_FIELDS = {
    "dtype": "bfloat16",
    "param_dtype": "bfloat16",
    "scan_layers": "unroll",
    "remat": "dense",
    "norm_first": False,
    "logical_axes": True,
    "chunk_size": 16,
    "implementation": "reference",
    "intermediate_size": 40,
}


@pytest.fixture(scope="module")
def model():
    return small.model(7, rate_scale=0.5)


@pytest.fixture(scope="module")
def params(model):
    return small.params(model)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_every_field_and_every_bit(version, tmp_path):
    more = {"rate_scale": 2.0} if version == 7 else {}
    model = small.model(version, **OTHER_FIELDS, **more)
    boxed = small.shapes(model, jnp.zeros((1, 2), jnp.int32))
    params = small.draw(jax.tree.map(lambda box: box.value, boxed, is_leaf=lambda x: hasattr(x, "names")))
    params["head"]["kernel"] = params["head"]["kernel"].astype(jnp.float32)
    extras = {"blocks.0.att.time_state": np.ones((2, 16, 16), np.float32)}
    save_checkpoint(tmp_path / "model", model, params, extras=extras, tokenizer="bytes")
    got, got_params = load_checkpoint(tmp_path / "model")
    assert type(got) is type(model) and got.config == model.config
    same(got_params, params)
    same(load_extras(tmp_path / "model"), extras)
    with ocp.StandardCheckpointer() as reader:  # without this library
        same(reader.restore(tmp_path / "model" / "params"), params)
    said = json.loads((tmp_path / "model" / "fla_jax.json").read_text())
    assert (said["version"], said["tokenizer"]) == (__version__, "bytes")


def test_options(model, params, tmp_path):
    save_checkpoint(tmp_path / "model", model, params, format="orbax")
    got, got_params = load_checkpoint(tmp_path / "model", scan_layers=True, dtype="bfloat16")
    assert got.config.rate_scale == 0.5 and got.config.dtype == "bfloat16"
    same(got_params, stack_layers(params))
    save_checkpoint(tmp_path / "model", got, got_params)
    same(load_checkpoint(tmp_path / "model", scan_layers=False)[1], params)
    half = load_checkpoint(tmp_path / "model", scan_layers=False, param_dtype="bfloat16")[1]
    same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert os.listdir(tmp_path) == ["model"] and load_extras(tmp_path / "model") == {}
    with pytest.raises(TypeError, match="load_checkpoint takes no option 'rate_scale'"):
        load_checkpoint(tmp_path / "model", rate_scale=1.0)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_one_layer_is_stacked(version, tmp_path):
    """Where layer 0 of RWKV-7 lacks v0, v1, v2, and no other layer has them, they are zero."""
    model = small.model(version, num_layers=1, param_dtype="bfloat16")
    params = small.params(model)
    save_checkpoint(tmp_path / "model", model, params)
    got, stacked = load_checkpoint(tmp_path / "model", scan_layers=True)
    want = small.shapes(got, jnp.zeros((1, 1), jnp.int32))
    assert small.kinds(stacked) == small.kinds(want)
    att = stacked["blocks"]["att"]
    added = {name: att.pop(name) for name in want["blocks"]["att"] if name not in params["blocks_0"]["att"]}
    assert {*added} == ({"v0", "v1", "v2"} if version == 7 else set())
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(added))
    same(jax.tree.map(lambda x: x[0], stacked["blocks"]), params["blocks_0"])


def test_no_device_gets_more_than_its_shards(tmp_path):
    """On eight devices, whatever the mesh that the parameters come from."""
    found = processes.report("checkpoints/native_run.py", str(tmp_path))
    whole = found["one device"][0]  # what is recorded is what is put
    assert {(24, 32), (32, 128)} <= whole
    for name in ("the same", "another"):
        put, shards = found[name]
        assert put <= shards and not put & {(24, 32), (32, 128)}, name


def test_a_save_that_fails_leaves_the_last_one(model, params, tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "model", model, params)
    (tmp_path / ".model.fla_jax-new").mkdir()  # of a process that was killed
    (tmp_path / ".model.fla_jax-new" / "extras").write_text("")

    def full(*args, **options):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "wait_until_finished", full)
        with pytest.raises(ValueError, match="model cannot be written: No space left on device"):
            save_checkpoint(tmp_path / "model", model, jax.tree.map(jnp.zeros_like, params))
    same(load_checkpoint(tmp_path / "model")[1], params)
    save_checkpoint(tmp_path / "model", model, params)
    assert os.listdir(tmp_path) == ["model"] and load_extras(tmp_path / "model") == {}


def test_neighbours_stay(model, params, tmp_path):
    save_checkpoint(tmp_path / "model", model, params)
    for name in ("model.old", "model.new"):
        (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / "model", model, params)
    assert sorted(os.listdir(tmp_path)) == ["model", "model.new", "model.old"]


def test_a_save_killed_before_its_last_step(model, params, tmp_path, monkeypatch):
    """The complete new checkpoint is in place before the next save begins, which may fail."""
    save_checkpoint(tmp_path / "model", model, params)
    (tmp_path / "model").rename(tmp_path / ".model.fla_jax-new")
    monkeypatch.setattr(ocp.StandardCheckpointer, "save", lambda *args: 1 / 0)
    with pytest.raises(ValueError, match="model cannot be written"):
        save_checkpoint(tmp_path / "model", model, params)
    same(load_checkpoint(tmp_path / "model")[1], params)


def test_symbolic_links_stay(model, params, tmp_path, monkeypatch):
    """Each save replaces the folder that the link names, also where the folder does not exist yet."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "real")
    for factor in (1.0, 2.0, 3.0):
        changed = jax.tree.map(lambda x, factor=factor: factor * x, params)
        save_checkpoint(tmp_path / "model", model, changed)
        same(load_checkpoint(tmp_path / "disk" / "real")[1], changed)
    assert (tmp_path / "model").is_symlink() and os.listdir(tmp_path / "disk") == ["real"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "model"]
    monkeypatch.chdir(tmp_path / "disk" / "real")
    for path in (".", tmp_path / "model"):
        with pytest.raises(ValueError, match=f"^{path} is the current folder or one above it"):
            save_checkpoint(path, model, params, format="orbax")


def test_tokenizers(model, params, tmp_path):
    """A name, or a file that is copied; `load_tokenizer` takes the folder."""
    save_checkpoint(tmp_path / "model", model, params, tokenizer="bytes")
    assert load_tokenizer(tmp_path / "model").encode("Hi") == [72, 105]
    save_checkpoint(tmp_path / "model", model, params)
    with pytest.raises(ValueError, match="model was saved without a tokenizer"):
        load_tokenizer(tmp_path / "model")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_checkpoint(tmp_path / "model", model, params, tokenizer=tmp_path / "tokenizer.json")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    with pytest.raises((ValueError, ImportError), match=r"model/tokenizer\.json is"):
        load_tokenizer(tmp_path / "model")


def test_refusals(model, params, tmp_path):
    path, message = (
        tmp_path / "model",
        "tokenizer must be a file, or a folder with files of a tokenizer, or a name",
    )
    for options, said in (
        ({"format": "onnx"}, "format must be one of 'orbax', 'pth', 'huggingface' or None, got 'onnx'"),
        ({"max_shard_size": 10}, "max_shard_size is of the format 'huggingface'"),
        ({"tokenizer": "missing/tokenizer.json"}, message),
        ({"extras": {"x": np.ones(1)}}, "extras: 'x' is no tensor that a checkpoint may have"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            save_checkpoint(path, model, params, **options)
    with pytest.raises(ValueError, match=r"tokenizer must be None for a \.pth file"):
        save_checkpoint(tmp_path / "a.pth", small.model(7), params, tokenizer="bytes")
    with pytest.raises(ValueError, match="params lack blocks_1/"):
        save_checkpoint(path, model, {name: x for name, x in params.items() if name != "blocks_1"})
    save_checkpoint(path, small.model(7), params)
    with pytest.raises(ValueError, match="model already holds a checkpoint in the library's own format"):
        save_checkpoint(path, small.model(7), params, format="huggingface")
    assert sorted(os.listdir(path)) == ["fla_jax.json", "params"]
    shutil.rmtree(path)
    path.mkdir()
    (path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="model holds something that is no checkpoint of fla_jax"):
        save_checkpoint(path, model, params)
    (path / "thesis.tex").unlink()
    save_checkpoint(path, model, params)
    description = json.loads((path / "fla_jax.json").read_text())

    def refuses(change, said):
        (path / "fla_jax.json").write_text(json.dumps({**description, **change}))
        with pytest.raises(ValueError, match=said):
            load_checkpoint(path)

    config = description["config"]
    refuses(
        {"version": "9.0", "config": {**config, "depth": 3}}, r"fla_jax 9\.0: .* only fields .* got depth"
    )
    refuses({"config": {**config, "head_dim": 5}}, "hidden_size must be a multiple of head_dim")
    refuses({"config": None}, "values must be a mapping")
    refuses({"config": {**config, "vocab_size": 25}}, r"emb/embedding must have shape \[25, 32\], got \[24, ")
    refuses({"config": {**config, "num_layers": 3}}, "blocks_2/.* must have shape .*, got none")
    (path / "fla_jax.json").write_text(json.dumps(description))
    shutil.rmtree(path / "params" / "d", ignore_errors=True)
    shutil.rmtree(path / "params" / "ocdbt.process_0")
    with pytest.raises(ValueError, match="model/params cannot be read: "):
        load_checkpoint(path)
