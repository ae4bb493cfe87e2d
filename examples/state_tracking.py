"""One RWKV-7 layer learns parity, and one without its in-context rate cannot:
``python examples/state_tracking.py``.

The task: after each of many random bits, tell whether the number of ones so far is odd. The solution stores
one bit and flips it at every one. A layer whose state only decays (in-context rate 0, RWKV-6's class) cannot
flip. RWKV-7's transition ``diag(w) - rate kk kk^T`` flips the direction kk with a rate close to 2, hence
``rate_scale=2``; the official scale 1 can only forget.

Each layer is trained on short sequences and tested on sequences four times as long. About a minute on two CPU
cores; prints a table, saves a picture.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _cli import check_numbers, parse, program
from rich.progress import track

from fla_jax.checkpoints.files import replacing
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
from fla_jax.training import cross_entropy, lock_folder, rwkv_optimizer, rwkv_schedule

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAYERS = {2.0: "rate scale 2", 1.0: "rate scale 1 (official)", 0.0: "rate 0 (RWKV-6's class)"}
STEPS_PER_CALL = 50


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    rate_scales: tuple[float, ...] = (2.0, 1.0, 0.0)
    """which layers to train, by their factor on the in-context rate, each from 0 to 2"""
    length: int = 32
    """bits per training sequence; the test has four times as many"""
    steps: int = 700
    """optimiser steps"""
    batch: int = 32
    """sequences per step"""
    learning_rate: float = 1e-2
    """largest learning rate"""
    hidden_size: int = 32
    """channels"""
    head_dim: int = 16
    """channels per head"""
    seed: int = 0
    """of parameters and data"""
    out: Path = Path("runs/state_tracking")
    """directory for the picture"""


def parity(key: jax.Array, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Random bits [batch, length], and after each whether the number of ones so far is odd."""
    bits = jax.random.bernoulli(key, shape=(batch, length)).astype(jnp.int32)
    return bits, jnp.cumsum(bits, axis=1) % 2


def train(model: RWKV7ForCausalLM, options: Options, label: str) -> tuple[Any, float]:
    """Parameters after training, and the last loss."""
    schedule = rwkv_schedule(options.learning_rate, 0.1 * options.learning_rate, options.steps)
    # weight decay would pull the transition's eigenvalue away from -1, and errors grow with its power
    optimizer = rwkv_optimizer(schedule, weight_decay=0.0)

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = carry
        bits, labels = parity(key, options.batch, options.length)
        loss_fn = lambda params: cross_entropy(model.apply({"params": params}, bits)[0], labels, l2wrap=0.0)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (jax.tree.map(jnp.add, params, updates), opt_state), loss

    steps = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys), donate_argnums=0)
    key, data_key = jax.random.split(jax.random.key(options.seed))
    params = jax.jit(model.init)(key, jnp.zeros((1, 2), jnp.int32))["params"]
    carry, keys = (params, optimizer.init(params)), jax.random.split(data_key, options.steps)
    for start in track(range(0, options.steps, STEPS_PER_CALL), description=f"{label:28}"):
        carry, losses = steps(carry, keys[start : start + STEPS_PER_CALL])
        loss = float(losses[-1])
    return carry[0], loss


@functools.partial(jax.jit, static_argnums=(0, 2))
def accuracy(model: RWKV7ForCausalLM, params: Any, length: int) -> jax.Array:
    """Share of right answers at every position [length], over 512 sequences that training has not seen."""
    bits, labels = parity(jax.random.key(2**31), 512, length)
    logits, _ = model.apply({"params": params}, bits)
    return jnp.mean(jnp.argmax(logits, -1) == labels, axis=0)


def plot(path: Path, curves: dict[str, np.ndarray], length: int) -> None:
    """Draws accuracy over position, averaged over 8 neighbouring positions."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, curve in curves.items():
        width = min(8, length)
        smooth = curve[: len(curve) // width * width].reshape(-1, width).mean(-1)
        axes.plot((np.arange(len(smooth)) + 0.5) * width, 100 * smooth, "o-", ms=3, label=label)
    axes.axvspan(0, length, color="tab:gray", alpha=0.2, label="training length")
    axes.axhline(50, color="black", lw=1, ls=":", label="chance")
    axes.set(xlabel="position", ylabel="right answers, %", ylim=(40, 103), xlim=(0, 4 * length))
    axes.set_title("Parity of the bits so far, one layer")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")
    plt.close(figure)


def run(options: Options) -> None:
    """Trains and prints."""
    n = options.length
    ranges = f"1-{n}", f"{n + 1}-{2 * n}", f"{2 * n + 1}-{4 * n}"
    lines = [f"right answers, %, at bits   {ranges[0]:>8}{ranges[1]:>8}{ranges[2]:>8}      loss  seconds"]
    curves = {}
    for scale in options.rate_scales:
        began = time.perf_counter()
        label = LAYERS.get(scale, f"rate scale {scale:g}")
        sizes = {"hidden_size": options.hidden_size, "num_layers": 1, "head_dim": options.head_dim}
        model = RWKV7ForCausalLM(RWKV7Config(2, **sizes, rate_scale=scale))
        params, loss = train(model, options, label)
        curve = curves[label] = np.asarray(accuracy(model, params, 4 * n))
        right = "".join(f"{100 * part.mean():8.1f}" for part in (curve[:n], curve[n : 2 * n], curve[2 * n :]))
        lines.append(f"{label:28}{right}{loss:10.1e}{time.perf_counter() - began:9.0f}")
    print("\n".join(lines))
    plot(options.out / "parity.png", curves, n)
    print(f"picture: {options.out / 'parity.png'}")


@program(lower="--batch, --length or --hidden-size")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check_numbers(options)
    if options.steps <= 10:
        raise ValueError(f"--steps must be above 10, the steps of the warm-up, got {options.steps}")
    if not options.rate_scales:
        raise ValueError("--rate-scales must name at least one layer")
    with lock_folder(options.out):
        run(options)


if __name__ == "__main__":
    main()
