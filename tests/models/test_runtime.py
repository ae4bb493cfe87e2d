"""Loaded checkpoints against the packages that RWKV users run: rwkv, and rwkv7-hf for gradients."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small

from fla_jax.checkpoints import load_checkpoint, load_extras, save_checkpoint

TOLERANCE = 5e-6
TOKENS = np.random.default_rng(3).integers(0, 24, 17)
SPLITS = {"whole": [17], "steps": [1] * 17, "split": [8, 1, 8]}
# sizes of the model; dtype of the file; what else is in the file
CASES = {
    "heads64": ({"hidden_size": 128, "head_dim": 64}, "float32", ()),
    "heads32": ({"hidden_size": 64, "head_dim": 32}, "float32", ("time_state",)),
    "one_layer": ({"hidden_size": 64, "head_dim": 32, "num_layers": 1}, "bfloat16", ()),
    "bfloat16": (
        {"hidden_size": 128, "head_dim": 64, "num_layers": 3},
        "bfloat16",
        ("time_state", "layer0_v"),
    ),
    "layer0_v": ({"hidden_size": 64, "head_dim": 64}, "float32", ("layer0_v",)),
}

RUNTIME = """
import sys, numpy as np, torch
version, names = int(sys.argv[1]), sys.argv[2:]
from rwkv.model import RWKV
tokens, splits = np.load("tokens.npy").tolist(), {"whole": [17], "steps": [1] * 17, "split": [8, 1, 8]}
for name in names:
    dtype = torch.bfloat16 if name in ("one_layer", "bfloat16") else torch.float32
    if name != "one_layer":  # written by the package under test
        tensors = {key: torch.from_numpy(x.copy()).to(dtype) for key, x in np.load(name + ".npz").items()}
        torch.save(tensors, name + ".pth")
    z, path = torch.load(name + ".pth", weights_only=True), name
    # Its RWKV-6 normalises the embedding in the file's dtype, and rounds it: the same values in float32.
    if version == 6 and dtype != torch.float32:
        path = name + ".float32"
        torch.save({key: x.float() for key, x in z.items()}, path + ".pth")
    model = RWKV(model=path, strategy="cpu fp32")
    results = {}
    for split, lengths in splits.items():
        state, rows, start = None, [], 0
        # Its RWKV-7 does not look for them, its RWKV-6 does.
        if version == 7 and "blocks.0.att.time_state" in z:
            state = model.generate_zero_state()
            for i in range(len(state) // 3):
                state[3 * i + 1] = z[f"blocks.{i}.att.time_state"].float()
        for length in lengths:
            out, state = model.forward(tokens[start : start + length], state, full_output=True)
            rows.append(out.reshape(length, -1))
            start += length
        results[split + ".logits"] = torch.cat(rows).float().numpy()
        for i, part in enumerate(("att_shift", "wkv", "ffn_shift")):
            results[split + "." + part] = torch.stack([x.float() for x in state[i::3]]).numpy()
    np.savez(name + ".out.npz", **results)
"""


def weights(model, version, extras):
    """A model's tensors in the official names, float32."""
    z, rng = official.checkpoint(small.params(model), version), np.random.default_rng(0)
    C, N = model.config.hidden_size, model.config.head_dim
    if "time_state" in extras:
        z |= {
            f"blocks.{i}.att.time_state": rng.normal(size=(C // N, N, N)).astype(np.float32)
            for i in range(model.config.num_layers)
        }
    if "layer0_v" in extras and version == 7:
        z |= {f"blocks.0.att.{name}": z[f"blocks.1.att.{name}"] for name in ("v0", "v1", "v2")}
    return z


@pytest.fixture(scope="module", params=small.VERSIONS)
def runtime(request, tmp_path_factory):
    """Folder with {case}.pth and {case}.out.npz, the package's results."""
    for package in ("torch", "rwkv"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'fla-jax[parity]')")
    version, folder = request.param, tmp_path_factory.mktemp("runtime")
    np.save(folder / "tokens.npy", TOKENS)
    for name, (sizes, dtype, extras) in CASES.items():
        model = small.model(version, param_dtype=dtype, **sizes)
        np.savez(folder / f"{name}.npz", **weights(model, version, extras))
        if name == "one_layer":
            save_checkpoint(folder / "one_layer.pth", model, small.params(model))
    env = {**os.environ, "RWKV_V7_ON": "1" if version == 7 else "0", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RUNTIME, str(version), *CASES],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return version, folder


@functools.cache
def step(model):
    return jax.jit(model.apply)


def relative(got, want):
    assert got.shape == want.shape, (got.shape, want.shape)
    return np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_rwkv(runtime, name):
    """Logits of every token, and the state after the last, however the text is cut."""
    version, folder = runtime
    model, params = load_checkpoint(folder / f"{name}.pth", scan_layers=name == "heads64")
    sizes, dtype, extras = CASES[name]
    assert {
        field: getattr(model.config, field) for field in sizes
    } == sizes and model.config.param_dtype == jnp.dtype(dtype)
    tuned = {key: x for key, x in load_extras(folder / f"{name}.pth").items() if key.endswith("time_state")}
    assert bool(tuned) == ("time_state" in extras)
    want = np.load(folder / f"{name}.out.npz")
    for split, lengths in SPLITS.items():
        state = model.init_state(1)
        if tuned:
            wkv = [
                tuned[f"blocks.{i}.att.time_state"].astype(np.float32).swapaxes(1, 2)
                for i in range(model.config.num_layers)
            ]
            state = state.replace(wkv=jnp.asarray(wkv)[:, None])
        rows = []
        for tokens in np.split(TOKENS, np.cumsum(lengths)[:-1]):
            logits, state = step(model)({"params": params}, jnp.asarray(tokens)[None], state)
            rows.append(np.asarray(logits[0]))
        wkv = want[f"{split}.wkv"]
        wanted = {"logits": want[f"{split}.logits"], "wkv": wkv.swapaxes(2, 3) if version == 7 else wkv}
        wanted |= {part: want[f"{split}.{part}"] for part in ("att_shift", "ffn_shift")}
        got = {
            "logits": np.concatenate(rows),
            **{part: np.asarray(getattr(state, part))[:, 0] for part in ("att_shift", "ffn_shift", "wkv")},
        }
        for part, x in wanted.items():
            assert relative(got[part], x) < TOLERANCE, (split, part, relative(got[part], x))


def test_gradients_of_rwkv7_hf(tmp_path):
    """The whole model's gradient in float32, by PyTorch's autograd through a plain loop over tokens."""
    for package in ("torch", "transformers", "rwkv7_hf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'fla-jax[parity]')")
    import rwkv7_hf
    import torch

    # heads of 64: with others its group norm has another epsilon than the official one
    model = small.model(7, hidden_size=128, head_dim=64, num_layers=3, implementation="xla")
    params, tokens = small.params(model), small.tokens(2, 33)
    weights = np.random.default_rng(0).normal(size=(2, 33, 24)).astype(np.float32)
    save_checkpoint(tmp_path / "model", model, params, format="huggingface")
    theirs, info = rwkv7_hf.RWKV7ForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    want = theirs(torch.from_numpy(np.asarray(tokens, np.int64)), use_cache=False).logits
    (torch.tanh(want) * torch.from_numpy(weights)).sum().backward()

    def loss(params):
        logits, _ = model.apply({"params": params}, tokens)
        return jnp.sum(jnp.tanh(logits) * weights), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert relative(np.asarray(logits), want.detach().numpy()) < TOLERANCE
    # gradients have the parameters' shapes, so the same names and layouts
    save_checkpoint(tmp_path / "gradient", model, gradient, format="huggingface")
    from safetensors.numpy import load_file

    got = load_file(tmp_path / "gradient" / "model.safetensors")
    assert got.keys() == {name for name, _ in theirs.named_parameters()}
    for name, x in theirs.named_parameters():
        assert np.abs(x.grad.numpy()).max() > 1e-6, f"{name} has no gradient to compare"
        assert relative(got[name].reshape(x.shape), x.grad.numpy()) < 1e-4, name
