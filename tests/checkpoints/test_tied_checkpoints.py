"""Checkpoints of models whose head is the embedding, in every format."""

from __future__ import annotations

import json

import fla_names as fla
import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small
from harness.compare import assert_same_bits as same

from fla_jax.checkpoints import load_checkpoint, read_pth, save_checkpoint
from fla_jax.parallel import make_mesh, parameter_shardings


@pytest.fixture(scope="module", params=small.VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def model(version):
    return small.model(version, tie_embeddings=True)


@pytest.fixture(scope="module")
def params(model):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), small.params(model))


def with_head(params):
    return {**params, "head": {"kernel": params["emb"]["embedding"].T}}


def nearly_tied(params):
    """A head of which two values are not the embedding's, one by 0.5."""
    kernel = params["emb"]["embedding"].astype(jnp.float32).T
    return {**params, "head": {"kernel": kernel.at[3, 5].add(0.5).at[4, 6].add(-0.25)}}


def test_a_folder_for_hugging_face_has_no_head(version, model, params, tmp_path):
    save_checkpoint(tmp_path, model, params, format="huggingface")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    want = fla.tensors(version, official.file(version, with_head(params)), 2)
    del want["lm_head.weight"]
    assert fla.load(tmp_path).keys() == want.keys()
    loaded, same_params = load_checkpoint(tmp_path, scan_layers=False)
    assert loaded.config.tie_embeddings
    same(same_params, params)
    with pytest.raises(ValueError, match=r"lacks the tensor 'lm_head.weight'; tie_embeddings=True loads"):
        load_checkpoint(tmp_path, tie_embeddings=False)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_file_of_rwkv_lm_has_a_head(version, model, params, tmp_path, dtype):
    path = tmp_path / "a.pth"
    save_checkpoint(path, model, params)
    same(read_pth(path)["head.weight"], np.asarray(params["emb"]["embedding"]))
    options = {} if dtype is None else {"param_dtype": dtype}
    loaded, got = load_checkpoint(path, tie_embeddings=True, **options)
    assert loaded.config.tie_embeddings
    same(got, jax.tree.map(lambda x: x.astype(dtype or x.dtype), params))
    plain, got = load_checkpoint(path)
    assert not plain.config.tie_embeddings
    same(got, with_head(params))


@pytest.mark.parametrize("format", ["pth", "huggingface", "orbax"])
def test_another_head_is_refused_with_the_difference(version, params, tmp_path, format):
    path = tmp_path / ("a.pth" if format == "pth" else "a")
    save_checkpoint(path, small.model(version), jax.tree.map(jnp.float32, nearly_tied(params)), format=format)
    message = r"must be the embedding of .*, got 2 of 768 values that differ, by up to 0\.5; tie_embedd"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, tie_embeddings=True)
    assert "head" in load_checkpoint(path)[1]


def test_folders_of_the_library(version, model, params, tmp_path):
    """Tied or with a head that is the embedding, onto a mesh; a head cannot be made up."""
    save_checkpoint(tmp_path / "tied", model, params)
    save_checkpoint(tmp_path / "apart", small.model(version), with_head(params))
    mesh = make_mesh(devices=jax.devices()[:1])
    for name in ("tied", "apart"):
        where = lambda model: parameter_shardings(model, mesh)
        options = {"scan_layers": True, "shardings": where} if version == 7 else {}
        loaded, got = load_checkpoint(tmp_path / name, tie_embeddings=True, **options)
        assert loaded.config.tie_embeddings and "head" not in got
        same(got["emb"], params["emb"])
    with pytest.raises(ValueError, match="has no head: it was saved with tie_embeddings=True"):
        load_checkpoint(tmp_path / "tied", tie_embeddings=False)
