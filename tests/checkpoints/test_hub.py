"""Checkpoints in repositories at Hugging Face, with a cache that is made by hand and no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import small_models as small

from fla_jax.checkpoints import load_checkpoint, load_extras, save_checkpoint
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM, initial_params

constants = pytest.importorskip("huggingface_hub.constants")
ROOT = Path(__file__).parents[2]
COMMITS = {"main": "0" * 40, "v1": "1" * 40}


def put(cache, repo, revision, name, source):
    """Lays a file into the cache as huggingface_hub does."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMITS[revision])
    snapshot = folder / "snapshots" / COMMITS[revision]
    snapshot.mkdir(parents=True, exist_ok=True)
    blob = folder / "blobs" / f"{len(list(folder.rglob('*'))):040x}"
    blob.parent.mkdir(exist_ok=True)
    shutil.copy(source, blob)
    (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache with a repository of safetensors in two revisions, and one of .pth files."""
    home = tmp_path_factory.mktemp("home")
    cache = home / "hub"
    for revision, seed in (("main", 1), ("v1", 2)):
        model = small.model(7)
        save_checkpoint(home / revision, model, small.params(model, seed), format="huggingface")
        for name in ("model.safetensors", "config.json"):
            put(cache, "owner/tensors", revision, name, home / revision / name)
    extras = {"blocks.0.att.time_state": np.ones((2, 16, 16), np.float32)}
    model = small.model(6)
    save_checkpoint(home / "model.pth", model, small.params(model), extras=extras)
    put(cache, "owner/files", "main", "model.pth", home / "model.pth")
    return home


@pytest.fixture
def offline(home, monkeypatch):
    """What HF_HUB_CACHE and HF_HUB_OFFLINE do when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), got, want)


@pytest.mark.parametrize("name, seed", [("hf://owner/tensors", 1), ("hf://owner/tensors@v1", 2)])
def test_a_repository_of_safetensors(offline, name, seed):
    model, params = load_checkpoint(name, implementation="reference")
    assert model.config.num_layers == 2
    same(params, small.params(small.model(7), seed))


def test_a_file_of_a_repository(offline):
    _, params = load_checkpoint("hf://owner/files/model.pth")
    same(params, small.params(small.model(6)))
    assert list(load_extras("hf://owner/files@main/model.pth")) == ["blocks.0.att.time_state"]


def test_the_environment_is_respected(home):
    """In a process of its own: HF_HOME says where the cache is, HF_HUB_OFFLINE that nothing is asked for."""
    code = (
        "from fla_jax.checkpoints import load_checkpoint\n"
        "print(load_checkpoint('hf://owner/files/model.pth')[0].config.head_dim)\n"
        "load_checkpoint('hf://owner/absent')"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "16\n" and done.returncode == 1
    assert "\nFileNotFoundError: hf://owner/absent: " in done.stderr


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("hf://owner", ValueError, r"path must be hf://owner/name, with @revision and /file behind it"),
        ("hf://owner/na me", ValueError, r"path must be hf://owner/name"),
        ("hf://owner/name..x", ValueError, r"hf://owner/name\.\.x"),
        ("hf://owner/absent", FileNotFoundError, r"hf://owner/absent: "),
        ("hf://owner/files/other.pth", FileNotFoundError, r"hf://owner/files/other\.pth: "),
        ("hf://owner/tensors@v2", FileNotFoundError, r"hf://owner/tensors@v2: "),
        ("hf://owner/files", ValueError, r"holds no safetensors; .* hf://owner/files/NAME\.pth"),
    ],
)
def test_what_is_not_there_is_named(offline, name, error, message):
    with pytest.raises(error, match=message):
        load_checkpoint(name)


def test_models_are_not_written_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=8, hidden_size=16, num_layers=1, head_dim=16))
    with pytest.raises(
        ValueError, match=r"path must be local, hf:// is for loading models, got hf://owner/name"
    ):
        save_checkpoint("hf://owner/name", model, initial_params(model, jax.random.key(0)))
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"hf://owner/name needs .* pip install 'fla-jax\[hub\]'"):
        load_checkpoint("hf://owner/name")
