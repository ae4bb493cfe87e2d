"""Initial values against the official formulas, one channel at a time in Python floats."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

C, N, L, V = 64, 16, 4, 160


def vectors7(layer):
    down, up = 1 - layer / L, layer / (L - 1)
    out = {
        f"x_{n}": [1 - (i / C) ** (e * down) for i in range(C)]
        for n, e in zip("rwkvag", (0.2, 0.9, 0.7, 0.7, 0.9, 0.2))
    }
    line = [n / (C - 1) - 0.5 for n in range(C)]
    zig = [((n % N) - (N - 1) / 2) / ((N - 1) / 2) for n in range(C)]
    zig = [z * abs(z) for z in zig]
    out["w0"] = [-6 + 6 * (n / (C - 1)) ** (1 + up**0.3) + 0.5 + 2.5 * zig[n] for n in range(C)]
    out["a0"] = [-0.19 + 0.3 * zig[n] + 0.4 * line[n] for n in range(C)]
    out["v0"] = [0.73 - 0.4 * x for x in line]
    out["k_k"] = [0.71 - 0.1 * x for x in line]
    out["k_a"] = [1.02] * C
    out["r_k"] = [[-0.04] * N] * (C // N)
    ffn = {"x_k": [1 - (i / C) ** (down**4) for i in range(C)]}
    return out, ffn


def vectors6(layer):
    down, up = 1 - layer / L, layer / (L - 1)
    mix = lambda e: [1 - (i / C) ** e for i in range(C)]
    out = {f"time_maa_{n}": mix(e * down) for n, e in zip("xwkrg", (1, 1, 1, 0.5, 0.5))}
    out["time_maa_v"] = [x - 0.3 * up for x in mix(down)]
    out["time_decay"] = [-6 + 5 * (n / (C - 1)) ** (0.7 + 1.3 * up) for n in range(C)]
    out["time_faaaa"] = np.reshape(
        [up * (1 - n / (C - 1)) + 0.1 * ((n + 1) % 3 - 1) for n in range(C)], (C // N, N)
    )
    return out, {"time_maa_k": mix(down**3), "time_maa_r": mix(down**3)}


def orthogonality(kernel):
    """Gain of a (semi-)orthogonal matrix, and how far from one it is."""
    k = np.asarray(kernel, np.float64)
    gram = k @ k.T if k.shape[0] <= k.shape[1] else k.T @ k
    gain = math.sqrt(np.trace(gram) / len(gram))
    return gain, np.abs(gram - gain**2 * np.eye(len(gram))).max()


def made(version, scan):
    model = small.model(version, vocab_size=V, hidden_size=C, head_dim=N, num_layers=L, scan_layers=scan)
    return jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))["params"]


@pytest.mark.parametrize("version", small.VERSIONS)
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.one_python), True])
def test_official_formulas(version, scan):
    params = made(version, scan)
    seen = []
    for layer in range(L):
        block = jax.tree.map(lambda x, i=layer: x[i], params["blocks"]) if scan else params[f"blocks_{layer}"]
        att, ffn = block["att"], block["ffn"]
        for tree, want in zip((att, ffn), (vectors7 if version == 7 else vectors6)(layer)):
            for name, value in want.items():
                if name == "v0" and layer == 0:  # layer 0 has no value residual
                    assert not tree[name].any() if scan else name not in tree
                else:
                    np.testing.assert_allclose(
                        tree[name], value, rtol=2e-6, atol=2e-6, err_msg=f"{layer} {name}"
                    )
        np.testing.assert_allclose(att["ln_x"]["scale"], ((1 + layer) / L) ** 0.7, rtol=1e-6)
        gains = {
            "receptance": 1,
            "key": 0.1,
            "value": 1,
            "output": 0,
            **({"gate": 0.1} if version == 6 else {}),
        }
        kernels = [(att[name]["kernel"], gain) for name, gain in gains.items()]
        kernels += [(ffn["key"]["kernel"], 1), (ffn["value"]["kernel"], 0)] + (
            [(ffn["receptance"]["kernel"], 0)] if version == 6 else []
        )
        if version == 7:
            kernels += [(att[f"{n}1"], 0) for n in "wavg" if f"{n}1" in att] + [
                (att[f"{n}2"], 0.1) for n in "wavg" if layer > 0 or n != "v"
            ]
        else:
            kernels += [(att["time_maa_w1"], 0), (att["time_decay_w1"], 0)]
            for name in ("time_maa_w2", "time_decay_w2"):
                assert 0.009 < np.abs(att[name]).max() <= 0.01 and abs(np.mean(att[name])) < 1e-3
        for kernel, gain in kernels:
            got, off = orthogonality(kernel)
            assert abs(got - gain) < 1e-5 and off < 1e-5
        seen.append(np.asarray(att["value"]["kernel"]))
        for norm in (block["ln1"], block["ln2"], att["ln_x"]):
            assert not norm["bias"].any()
    assert all(np.abs(seen[0] - other).max() > 0.1 for other in seen[1:]), (
        "layers must not share their random values"
    )
    gain, off = orthogonality(params["head"]["kernel"])
    assert abs(gain - 0.5 * math.sqrt(V / C)) < 1e-5 and off < 1e-5
    emb = np.asarray(params["emb"]["embedding"])
    assert 0.99e-4 < emb.max() <= 1e-4 and -1e-4 <= emb.min() < -0.99e-4 and abs(emb.mean()) < 2e-6


@pytest.mark.parametrize(
    "hidden, want",
    [
        (768, (64, 64, 32, 128)),
        (1024, (64, 64, 64, 160)),
        (2048, (128, 128, 64, 224)),
        (4096, (160, 160, 96, 320)),
    ],
)
def test_official_ranks(hidden, want):
    model = small.model(
        7,
        hidden_size=hidden,
        head_dim=64,
        **dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")),
    )
    params = small.shapes(model, jnp.zeros((1, 1), jnp.int32))
    assert tuple(params["blocks_1"]["att"][f"{n}1"].shape[1] for n in "wavg") == want
    assert params["blocks_1"]["ffn"]["key"]["kernel"].shape == (hidden, 4 * hidden)
    params = small.shapes(
        small.model(6, hidden_size=hidden, head_dim=64, proj_low_rank_dim=None, decay_low_rank_dim=None),
        jnp.zeros((1, 1), jnp.int32),
    )
    att, large = params["blocks_0"]["att"], hidden >= 4096
    assert att["time_maa_w2"].shape == (5, 64 if large else 32, hidden)
    assert att["time_decay_w2"].shape == (128 if large else 64, hidden)
    assert params["blocks_0"]["ffn"]["key"]["kernel"].shape == (hidden, math.floor(3.5 * hidden / 32) * 32)


def test_a_rank_above_the_width():
    """Official: then the gain grows by sqrt(rank / out)."""
    model = small.model(7, num_layers=1, gate_low_rank_dim=72)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    gain, off = orthogonality(params["blocks_0"]["att"]["g2"])
    assert abs(gain - 0.1 * math.sqrt(72 / 32)) < 1e-5 and off < 1e-5
