"""The pictures of the pages, each drawn from what the library computes or what was measured, as SVG.

``python docs/pictures.py docs/assets [NAME ...]`` writes the committed ones, which forges show as well;
``docs/hooks.py`` makes those of `GENERATED` whenever the site is built.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import records
import tables

from fla_jax.ops import chunk_rwkv6, chunk_rwkv7, fused_recurrent_rwkv6, fused_recurrent_rwkv7

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, OTHER, LOST = "#00796b", "#9aa0a6", "#c5221f"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "fla_jax",  # the same picture gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "figure.facecolor": "white",
}


def as_svg(figure: Any) -> str:
    """The picture's text; the figure is closed."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def decays() -> str:
    """The share of a token that remains after t tokens, for the log decays that the models use."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
        t = np.arange(0, 65)
        for w, label in (
            (-np.exp(-6.0), "-exp(-6)"),
            (-np.exp(-3.0), "-exp(-3)"),
            (-np.exp(-0.5), "-exp(-1/2): RWKV-7's strongest"),
            (-np.exp(1.0), "-exp(1)"),
            (-np.exp(3.0), "-exp(3): RWKV-6 has no bound"),
        ):
            axes.plot(t, np.exp(w * t), label=f"w = {label}")
        axes.set(xlabel="tokens since", ylabel="share that remains, exp(w t)", xlim=(0, 64), ylim=(0, 1.02))
        axes.legend(frameon=False)
        return as_svg(figure)


def _states(op: Callable[..., Any], arrays: list[jax.Array], rest: list[jax.Array]) -> list[np.ndarray]:
    """The state [K, V] after each token."""
    states, state = [], jnp.zeros((1, 1, arrays[0].shape[-1], arrays[0].shape[-1]))
    for t in range(arrays[0].shape[1]):
        token = [x[:, t : t + 1] for x in arrays]
        _, state = op(*token, *rest, initial_state=state, output_final_state=True)
        states.append(np.asarray(state[0, 0]))
    return states


def forgetting() -> str:
    """A key is written at token 0 and again, with another value, at token 8; other keys in between."""
    K, T, again = 8, 16, 8
    keys = np.zeros((1, T, 1, K), np.float32)
    keys[0, np.arange(T), 0, np.arange(T) % (K - 1) + 1] = 1  # unit vectors, never the first one
    keys[0, (0, again), 0] = np.eye(K, dtype=np.float32)[0]
    values = np.zeros_like(keys)
    values[0, :, 0, 2:] = 0.15 * np.random.default_rng(0).normal(size=(T, K - 2))
    values[0, 0, 0, :2], values[0, again, 0, :2] = (1, 0), (0, 1)
    k, v = jnp.asarray(keys), jnp.asarray(values)
    w = jnp.full_like(k, -0.05)
    six = _states(fused_recurrent_rwkv6, [k, k, v, w], [jnp.zeros((1, K))])
    seven = _states(fused_recurrent_rwkv7, [k, w, k, v, -k, k], [])
    shown = (0, again - 1, again, T - 1)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(shown) + 1, figsize=(10, 4), layout="constrained")
        for row, states, name in ((0, six, "RWKV-6 adds"), (1, seven, "RWKV-7 replaces")):
            for column, t in enumerate(shown):
                axes[row, column].imshow(states[t], cmap="RdBu_r", vmin=-1.5, vmax=1.5)
                axes[row, column].set(title=f"state after token {t}", xticks=[], yticks=[])
                axes[row, column].set_xlabel("values")
            axes[row, 0].set_ylabel(f"{name}\nkeys")
            read = np.array([state[0] for state in states])  # by the first key
            last = axes[row, -1]
            last.plot(read[:, 0], color=OTHER, label="first value")
            last.plot(read[:, 1], color=OURS, label=f"value of token {again}")
            last.set(title="the key reads", xlabel="token", ylim=(-0.1, 1.1))
            last.legend(frameon=False, fontsize=7)
        return as_svg(figure)


def _recurrence(r: Any, k: Any, v: Any, w: Any) -> np.ndarray:
    """RWKV-6 without bonus, token by token in float64, for one batch element and head."""
    r, k, v, w = (np.asarray(x[0, :, 0], np.float64) for x in (r, k, v, w))
    state, out = np.zeros((r.shape[1], v.shape[1])), []
    for t in range(len(r)):
        out.append(state.T @ r[t])
        state = np.exp(w[t])[:, None] * state + np.outer(k[t], v[t])
    return np.array(out)


def _textbook(r: Any, k: Any, v: Any, w: Any, chunk: int = 64) -> np.ndarray:
    """The same in chunks, with keys divided by the decays since the chunk's start, as often written."""
    r, k, v, w = (np.asarray(x[0, :, 0], np.float32) for x in (r, k, v, w))
    state, out = np.zeros((r.shape[1], v.shape[1]), np.float32), []
    with np.errstate(all="ignore"):
        for start in range(0, len(r), chunk):
            tokens = slice(start, start + chunk)
            gi = np.cumsum(w[tokens], 0, dtype=np.float32)
            qg = r[tokens] * np.exp(gi - w[tokens])
            A = np.tril(qg @ (k[tokens] * np.exp(-gi)).T, -1)
            out.append(qg @ state + A @ v[tokens])
            kg = k[tokens] * np.exp(gi[-1] - gi)
            state = np.exp(gi[-1])[:, None] * state + kg.T @ v[tokens]
    return np.concatenate(out)


def forms() -> str:
    """The largest error of each form of RWKV-6 in float32, over the strength of the decays."""
    T, K = 128, 16
    r, k, v = jax.random.normal(jax.random.key(0), (3, 1, T, 1, K))
    strengths = np.geomspace(0.01, 30, 15)
    u = jnp.zeros((1, K))
    calls = {
        "chunked, as chunk_rwkv6": jax.jit(lambda w: chunk_rwkv6(r, k, v, w, u, implementation="xla")[0]),
        "token by token": jax.jit(lambda w: fused_recurrent_rwkv6(r, k, v, w, u)[0]),
    }
    errors: dict[str, list[float]] = {name: [] for name in (*calls, "chunked, keys divided by decays")}
    for strength in strengths:
        w = -strength * jax.random.uniform(jax.random.key(1), (1, T, 1, K), minval=0.5, maxval=1.5)
        want = _recurrence(r, k, v, w)
        got = {name: np.asarray(call(w))[0, :, 0] for name, call in calls.items()}
        got["chunked, keys divided by decays"] = _textbook(r, k, v, w)
        for name, y in got.items():
            error = np.abs(y - want).max() / np.abs(want).max()
            errors[name].append(error if np.isfinite(error) else np.nan)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
        for (name, values), color in zip(errors.items(), (OURS, "#1a5fb4", LOST)):
            axes.loglog(strengths, np.maximum(values, 1e-9), "o-", ms=3, color=color, label=name)
            if np.isnan(values).any():
                first = strengths[np.argmax(np.isnan(values))]
                axes.axvspan(first, strengths[-1], color=color, alpha=0.1)
                axes.text(first * 1.1, 1e-2, "NaN from here on", color=color)
        axes.set(xlabel="mean of -w", ylabel="largest relative error", ylim=(1e-8, 1))
        axes.legend(frameon=False, loc="upper left")
        return as_svg(figure)


def orders() -> str:
    """Which tokens a chunked and a recurrent form visit together."""
    T, C = 16, 4
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
        step = np.arange(T)
        axes[0].imshow(np.where(step[:, None] >= step, step[:, None], np.nan), cmap="viridis", vmax=T)
        axes[0].set(title=f"token by token: {T} steps, one after the other")
        chunk = np.where((step[:, None] >= step), (step // C)[:, None], np.nan)
        axes[1].imshow(chunk, cmap="viridis", vmax=T / C)
        axes[1].set(title=f"in chunks of {C}: {T // C} steps of matrix products")
        for axis in axes:
            axis.set(xlabel="token that wrote", ylabel="token that reads", xticks=[], yticks=[])
        return as_svg(figure)


def growth() -> str:
    """The size of RWKV-7's state, with a and b as the layer makes them, and drawn at random."""
    T, K = 48, 16
    r, k, v, kk, x = jax.random.normal(jax.random.key(0), (5, 1, T, 1, K))
    kk = kk / jnp.linalg.norm(kk, axis=-1, keepdims=True)
    w = jnp.full_like(k, -0.05)
    gate = jax.nn.sigmoid(x)
    a, b = jax.random.uniform(jax.random.key(1), (2, 1, T, 1, K))

    def sizes(a: jax.Array, b: jax.Array) -> list[float]:
        read = lambda t: chunk_rwkv7(*(y[:, :t] for y in (r, w, k, v, a, b)), output_final_state=True)[1]
        return [float(jnp.linalg.norm(read(t))) for t in range(1, T + 1, 4)]

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
        t = np.arange(1, T + 1, 4)
        axes.semilogy(t, sizes(-kk, kk * gate), color=OURS, label="a = -kk, b = kk gate, |kk| = 1")
        axes.semilogy(t, sizes(a, b), color=LOST, label="a and b drawn from 0 to 1")
        axes.set(xlabel="tokens", ylabel="size of the state")
        axes.legend(frameon=False)
        return as_svg(figure)


def speed() -> str:
    """Forward and backward of the ops beside the fastest peer of the same run, for each GPU."""
    ours = []
    for path in sorted(records.RESULTS.glob("*.json")):
        for r in records.read(path):
            mine = r.get("library") == "fla_jax" and r.get("ratio") is not None
            if mine and r.get("op", "").split("_rwkv")[0] in ("chunk", "fused_recurrent"):
                ours.append(r)
    ours.sort(key=lambda r: r["ratio"])
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 0.25 * len(ours) + 1), layout="constrained")
        colors = [LOST if r["ratio"] > 1 else OURS for r in ours]
        axes.barh(range(len(ours)), [r["ratio"] for r in ours], color=colors)
        labels, white = [], {"facecolor": "white", "edgecolor": "none", "pad": 0}
        for i, r in enumerate(ours):
            B, T, H, K, _ = r["shape"]
            form = "" if r["form"] == "chunk" else f" {r['form']}"
            labels.append(f"RWKV-{r['op'][-1]}{form} {B} {T} {H} {K}, {r['pass']}, {tables.decay(r)}")
            text = f" {r['ratio']:.2f}  ({r['implementation']}; {r['peer']})"
            axes.text(r["ratio"], i, text, va="center", fontsize=7, bbox=white)
        axes.set_yticks(range(len(ours)), labels, fontsize=7)
        axes.axvline(1, color="black", lw=1, ls=":", zorder=0)
        axes.invert_yaxis()
        most = max(r["ratio"] for r in ours)
        axes.set(xlabel="time over the fastest peer's", xlim=(0, 1.5 * most))
        return as_svg(figure)


LIBRARIES = {
    "fla": "FLA",
    "jla": "jax-linear-attention",
    "rwkv-lm": "RWKV-LM",
    "rwkv_ops": "rwkv-ops",
    "fla_jax": "fla_jax (this library)",
}
COMPARED: dict[str, dict[str, Any]] = {
    "RWKV-7 op\n8 x 4096 tokens, 64 heads of 64": {
        "op": "chunk_rwkv7",
        "shape": [8, 4096, 64, 64, 64],
        "decay": "bounded",
    },
    "RWKV-6 op\n8 x 4096 tokens, 64 heads of 64": {
        "op": "chunk_rwkv6",
        "shape": [8, 4096, 64, 64, 64],
        "decay": "any-strong",
    },
    "RWKV-7 training step\n24 x 1024, 8 x 4096 tokens": {
        "op": "train_step",
        "model": "rwkv7",
        "remat": "none",
    },
}


def fastest(call: dict[str, Any]) -> list[tuple[str, float]]:
    """The time of each library for a call with forward and backward on an H200, the fastest first."""
    times: dict[str, float] = {}
    for r in records.read(records.RESULTS / "nvidia-h200.json"):
        is_call = "ms" in r and call.items() <= r.items() and r["dtype"] == "bfloat16"
        if call["op"] == "train_step":
            is_call = is_call and (r["shape"]["layers"], r["shape"]["batch"]) == (24, 8)
        else:
            is_call = is_call and r["pass"] == "fwd+bwd"
        if is_call:
            name = r.get("library") or r["implementation"]
            name = LIBRARIES.get(name, name)
            times[name] = min(r["ms"], times.get(name, r["ms"]))
    return sorted(times.items(), key=lambda item: item[1])


def compared() -> str:
    """Milliseconds of forward and backward, ours beside the fastest peers."""
    with plt.rc_context(STYLE | {"svg.fonttype": "none"}):
        figure, axes = plt.subplots(1, len(COMPARED), figsize=(11, 2.2), layout="constrained")
        for axis, (title, call) in zip(axes, COMPARED.items()):
            bars = fastest(call)[:4]
            colors = [OURS if name == LIBRARIES["fla_jax"] else OTHER for name, _ in bars]
            drawn = axis.barh([name for name, _ in bars], [ms for _, ms in bars], color=colors)
            axis.bar_label(drawn, [f"{ms:.3g} ms" for _, ms in bars], padding=3)
            axis.set(title=title, xlim=(0, 1.3 * bars[-1][1]), xticks=[])
            axis.spines["bottom"].set_visible(False)
            axis.invert_yaxis()
        return as_svg(figure)


def packages() -> str:
    """The Mermaid diagram of docs/architecture.md, for the site, which loads no scripts from elsewhere."""
    text = (Path(__file__).parent / "architecture.md").read_text()
    place = {"core": (0.0, 0)}  # below the package that it imports, a second importer to the right
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for above, below in re.findall(r"^ +(\w+) --> (\w+)$", text, re.MULTILINE):
            x, y = place[above]
            place[below] = (x + sum(at == (x, y - 1) for at in place.values()), y - 1)
            axes.annotate("", (place[below][0], y - 0.75), (x, y - 0.2), arrowprops={"arrowstyle": "->"})
        for name, (x, y) in place.items():
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": OURS}
            axes.text(x, y, name, ha="center", va="center", bbox=box)
        axes.set(xlim=(-1, 2), ylim=(min(y for _, y in place.values()) - 0.5, 0.5))
        axes.axis("off")
        return as_svg(figure)


def over_time() -> str:
    """Each measurement that several commits made, relative to the first of them."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
        ours = []
        for path in sorted(records.RESULTS.glob("*.history.jsonl")):
            chunked = (r for r in records.read_history(path) if r.get("form") == "chunk")
            ours += [r for r in chunked if r.get("library") == "fla_jax"]
        runs = sorted({r["run"] for r in ours})
        for one in sorted({records.measurement(r) for r in ours}):
            mine = sorted((r for r in ours if records.measurement(r) == one), key=lambda r: r["run"])
            if len({r["run"] for r in mine}) > 1:
                x = [runs.index(r["run"]) for r in mine]
                axes.plot(x, [r["ms"] / mine[0]["ms"] for r in mine], "o-", ms=3, lw=1, alpha=0.6)
        axes.axhline(1.05, color=LOST, lw=1, ls=":")
        axes.set_xticks(range(len(runs)), [_run_label(ours, run) for run in runs], fontsize=7)
        axes.set(ylabel="time, relative to the first", ylim=(0.8, 1.2))
        return as_svg(figure)


def _run_label(rows: list[records.Record], run: str) -> str:
    commit = next(r["commit"] for r in rows if r["run"] == run)
    return f"{run[:10]}\n{commit}"


COMMITTED = {draw.__name__: draw for draw in (compared, decays, forgetting, forms, orders, growth)}
GENERATED = {draw.__name__: draw for draw in (packages, speed, over_time)}


def main() -> None:
    """Writes the committed pictures, or those that are named, into a folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or COMMITTED:
        (folder / f"{name}.svg").write_text((COMMITTED | GENERATED)[name]())


if __name__ == "__main__":
    main()
