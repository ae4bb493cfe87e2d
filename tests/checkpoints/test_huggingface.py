"""Hugging Face's directories: shards and index, models without a norm of the embedding, FLA's own code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import fla_names as fla
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small
from harness.compare import assert_same_bits as same

from fla_jax.checkpoints import load_checkpoint, save_checkpoint
from fla_jax.generation import SamplingParams, generate

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model():
    return small.model(7)


@pytest.fixture(scope="module")
def params(model):
    return small.params(model)


def test_shards_and_their_index(model, params, tmp_path):
    names = fla.tensors(7, official.file(7, params), 2)
    total = sum(x.nbytes for x in names.values())
    for _ in range(2):  # over itself
        save_checkpoint(tmp_path, model, params, format="huggingface", max_shard_size=20_000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert sorted(os.listdir(tmp_path)) == ["config.json", "generation_config.json", *files, INDEX]
    assert total / 20_000 < len(files) < 2 * total / 20_000
    assert index["metadata"] == {"total_parameters": total // 4, "total_size": total}
    for file in files:
        found = fla.load(tmp_path, file)
        assert found.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert sum(x.nbytes for x in found.values()) <= 20_000
        same(found, {name: np.ascontiguousarray(names[name]) for name in found})
    assert index["weight_map"].keys() == names.keys()
    same(load_checkpoint(tmp_path)[1], params)
    with pytest.raises(ValueError, match=r"already holds a model in other files \(model-00001-of-"):
        save_checkpoint(tmp_path, model, params, format="huggingface")
    with pytest.raises(ValueError, match="max_shard_size must be an integer >= 1, got 0"):
        save_checkpoint(tmp_path, model, params, format="huggingface", max_shard_size=0)


def test_files_beside_the_tensors(model, params, tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    files = (
        "tokenizer_config.json",
        "special_tokens_map.json",
        "rwkv_vocab_v20230424.txt",
        "tokenization.py",
    )
    for name in (*files, "model.txt"):
        (source / name).write_text(name)
    save_checkpoint(tmp_path / "a", model, params, format="huggingface", tokenizer=source)
    kept = {"config.json", "generation_config.json", "model.safetensors", *files}
    assert set(os.listdir(tmp_path / "a")) == kept
    assert all((tmp_path / "a" / name).read_text() == name for name in files)
    said = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert said == {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    with pytest.raises(ValueError, match=r"tokenizer must be a file, or a folder .*, got 'bytes'"):
        save_checkpoint(tmp_path / "b", model, params, format="huggingface", tokenizer="bytes")


@pytest.mark.parametrize("version", small.VERSIONS)
def test_without_a_norm_of_the_embedding(version, tmp_path):
    """The norm folded into the table: the same model, also decoded; a .pth file of it needs an option."""
    model = small.model(version)
    params = small.params(model)
    table, norm = np.asarray(params["emb"]["embedding"], np.float64), params["ln0"]
    centred = table - table.mean(1, keepdims=True)
    folded = centred / np.sqrt(table.var(1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]
    tree = {name: x for name, x in params.items() if name != "ln0"}
    tree["emb"] = {"embedding": jnp.asarray(folded, jnp.float32)}
    bare = small.model(version, norm_first=False)
    save_checkpoint(tmp_path / "a", bare, tree, format="huggingface")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["norm_first"] is False
    assert not [name for name in fla.load(tmp_path / "a") if "pre_norm" in name]
    got, got_params = load_checkpoint(tmp_path / "a")
    assert got.config.norm_first is False
    same(got_params, tree)
    save_checkpoint(tmp_path / "b.pth", got, got_params)
    with pytest.raises(ValueError, match=r"lacks the tensor 'blocks.0.ln0.\w+'; norm_first=False loads"):
        load_checkpoint(tmp_path / "b.pth")
    same(load_checkpoint(tmp_path / "b.pth", norm_first=False)[1], tree)
    tokens = small.tokens(2, 9)
    logits = [m.apply({"params": p}, tokens)[0] for m, p in ((model, params), (got, got_params))]
    small.assert_close(logits[1], logits[0])
    if version == 6:  # the table of a decoder is made alike
        return
    greedy = SamplingParams(temperature=0, presence_penalty=0, frequency_penalty=0)
    (want,), (same_text,) = (
        generate(m, p, [[1, 2, 3]], greedy, max_tokens=6) for m, p in ((model, params), (got, got_params))
    )
    assert same_text.tokens.tolist() == want.tokens.tolist()


def test_a_norm_that_the_configuration_denies(model, params, tmp_path):
    save_checkpoint(tmp_path, model, params, format="huggingface")
    config = json.loads((tmp_path / "config.json").read_text())
    for value, message in (
        (False, "holds the tensor 'model.layers.0.pre_norm.*', which RWKV-7 has not"),
        ("no", "config.json: norm_first must be True or False, got 'no'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "norm_first": value}))
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path)


# Saves a model of FLA, then loads what this library has made of it: names, shapes, dtypes and bits.
FLA = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from fla import models

step, folders = sys.argv[1], sys.argv[2:]
for folder in folders:
    version, norm_first, tied = int(folder[-3]), folder[-2] == "1", folder[-1] == "1"
    Config, Model = getattr(models, f"RWKV{version}Config"), getattr(models, f"RWKV{version}ForCausalLM")
    sizes = dict(vocab_size=24, hidden_size=32, num_hidden_layers=2, norm_first=norm_first)
    sizes |= dict(tie_word_embeddings=tied)
    if version == 7:
        ranks = dict(decay_low_rank_dim=4, a_low_rank_dim=6, v_low_rank_dim=5, gate_low_rank_dim=8)
        config = Config(head_dim=16, **sizes, **ranks)
    else:
        ranks = dict(proj_low_rank_dim=4, gate_low_rank_dim=8)
        config = Config(num_heads=2, expand_k=1.0, intermediate_size=96, **sizes, **ranks)
    torch.manual_seed(0)
    model = Model(config).to(torch.bfloat16)
    for x in model.parameters():
        torch.nn.init.normal_(x)
    if step == "save":
        model.save_pretrained(folder, max_shard_size="20KB")
    else:
        got, info = Model.from_pretrained(folder, output_loading_info=True, dtype="auto")
        surplus = [f"model.layers.{i}.attn.time_state" for i in range(2)] if tied else []
        assert sorted(info.pop("unexpected_keys")) == surplus and not any(info.values()), info
        want, got = model.state_dict(), got.state_dict()
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert got[name].dtype == x.dtype and torch.equal(got[name], x), name
"""


@pytest.mark.slow
@pytest.mark.one_python
def test_flash_linear_attention(tmp_path):
    """FLA's models, saved by transformers, through this library and a .pth file, and back into FLA's code.

    Which leaves tuned states out.
    """
    for package in ("torch", "transformers", "fla"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'fla-jax[parity]')")

    def run(step, folders):
        arguments = [sys.executable, "-c", FLA, step, *map(str, folders)]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    def kinds(folder):
        files = [fla.load(folder, file.name) for file in folder.glob("*.safetensors")]
        return {name: (x.shape, x.dtype) for tensors in files for name, x in tensors.items()}

    cases = [(a, *b) for a in small.VERSIONS for b in ((True, False), (False, False), (True, True))]
    theirs, ours = ([tmp_path / f"{who}{a}{b:d}{c:d}" for a, b, c in cases] for who in ("theirs", "ours"))
    run("save", theirs)
    for (_, norm_first, tied), source, target in zip(cases, theirs, ours, strict=True):
        model, params = load_checkpoint(source)
        assert model.config.norm_first is norm_first and model.config.tie_embeddings is tied
        assert model.config.head_dim == 16
        save_checkpoint(tmp_path / "a.pth", model, params)
        model, params = load_checkpoint(tmp_path / "a.pth", norm_first=norm_first, tie_embeddings=tied)
        states = jnp.ones((2, 2, 16, 16)) if tied else None
        save_checkpoint(target, model, params, format="huggingface", max_shard_size=20_000, states=states)
        maps = [json.loads((folder / INDEX).read_text())["weight_map"] for folder in (source, target)]
        states = {name for name in maps[1] if name.endswith("attn.time_state")}
        assert len(states) == 2 * tied and maps[0].keys() == maps[1].keys() - states
        assert kinds(source) == {name: kind for name, kind in kinds(target).items() if name not in states}
    run("load", ours)
