"""A model learns to add by reinforcement learning, GRPO: ``python examples/grpo.py``.

The prompt is ``7+5=``, the right completion ``12``, and the reward the share of its digits that are right.
Nothing shows the model a sum. A step:

1. rollout: a `Generator` samples a group of completions of every prompt, with their log-probabilities;
2. advantage: a completion's reward less its group's mean, by the group's standard deviation;
3. update: packed rows, PPO's clipped ratio of new to old probabilities (Shao et al. 2024, "DeepSeekMath",
   equation 3, without the term of a reference model);
4. `Generator.update_params` passes the new parameters on, nothing is compiled again.

Three to five minutes on two CPU cores; prints the curve, saves a picture.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _cli import check_numbers, parse, program

from fla_jax.checkpoints.files import replacing
from fla_jax.generation import Completion, Generator, SamplingParams
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import lock_folder, rwkv_optimizer, token_logprobs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

VOCABULARY = "0123456789+="
ANSWER = 2  # digits
LENGTH = 4 + ANSWER  # tokens of a prompt and its completion


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the training."""

    steps: int = 250
    """rollouts"""
    prompts: int = 64
    """prompts per step"""
    group: int = 8
    """completions of each prompt"""
    updates: int = 2
    """optimiser steps per rollout"""
    clip: float = 0.2
    """largest change of a token's probability ratio that is rewarded"""
    learning_rate: float = 1e-3
    """of the optimiser"""
    hidden_size: int = 64
    """channels"""
    layers: int = 2
    """layers"""
    seed: int = 0
    """of parameters, prompts and samples"""
    out: Path = Path("runs/grpo")
    """directory for the picture"""


class Batch(NamedTuple):
    """Completions with their prompts, one group of a prompt in each row."""

    tokens: np.ndarray  # [prompts, group * LENGTH]
    segment_ids: np.ndarray
    is_answer: np.ndarray  # which tokens were sampled
    old_logprobs: np.ndarray  # of the sampled tokens, when they were
    advantages: np.ndarray


def sums(rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [number, 4], and their answers [number, 2], the tens first."""
    a, b = rng.integers(0, 10, (2, number))
    plus, equals = (np.full(number, VOCABULARY.index(sign)) for sign in "+=")
    return np.stack([a, plus, b, equals], 1), np.stack([(a + b) // 10, (a + b) % 10], 1)


def pack(prompts: np.ndarray, answers: np.ndarray, completions: list[Completion]) -> tuple[Batch, float]:
    """The batch of a rollout, and the mean reward."""
    number, group = len(prompts), len(completions) // len(prompts)
    sampled = np.stack([one.tokens for one in completions]).reshape(number, group, ANSWER)
    logprobs = np.stack([one.logprobs.chosen for one in completions]).reshape(number, group, ANSWER)
    rewards = (sampled == answers[:, None]).mean(-1)
    advantages = rewards - rewards.mean(1, keepdims=True)
    advantages /= rewards.std(1, keepdims=True) + 1e-3

    def rows(of_prompt: Any, of_answer: Any, dtype: Any) -> np.ndarray:
        parts = (np.broadcast_to(of_prompt, (number, group, 4)), np.broadcast_to(of_answer, sampled.shape))
        return np.concatenate(parts, -1).astype(dtype).reshape(number, group * LENGTH)

    ids = np.arange(group)[:, None]
    batch = Batch(
        rows(prompts[:, None], sampled, np.int32),
        rows(ids, ids, np.int32),
        rows(0, 1, np.float32),
        rows(0, logprobs, np.float32),
        rows(0, advantages[..., None], np.float32),
    )
    return batch, float(rewards.mean())


def grpo_loss(model: RWKV7ForCausalLM, clip: float) -> Any:
    """``loss(params, batch) -> (scalar, largest difference between sampler and model)``."""

    def loss(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        new = token_logprobs(model, params, batch.tokens, segment_ids=batch.segment_ids)
        answer, old, advantages = (x[:, 1:] for x in batch[2:])
        change = answer * (new - old)
        ratio = jnp.exp(change)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
        return -jnp.sum(gain * answer) / jnp.sum(answer), jnp.abs(change).max()

    return loss


def train(options: Options) -> Iterator[tuple[float, float, dict[str, float]]]:
    """Of every step: the mean reward, the difference of `grpo_loss` before the update, seconds by part."""
    model = RWKV7ForCausalLM(
        RWKV7Config(len(VOCABULARY), options.hidden_size, num_layers=options.layers, head_dim=32)
    )
    optimizer = rwkv_optimizer(options.learning_rate, weight_decay=0.0)
    mesh = make_mesh(devices=jax.devices()[:1])
    step = TrainStep(model, optimizer, mesh, grpo_loss(model, options.clip), has_aux=True)
    state = step.init(jax.random.key(options.seed))
    rng, samples = np.random.default_rng(options.seed), options.prompts * options.group
    generator = Generator(model, state.params, slots=samples, cache_bytes=0)
    for i in range(options.steps):
        times = [time.perf_counter()]
        prompts, answers = sums(rng, options.prompts)
        rules = SamplingParams.policy(n=options.group, max_tokens=ANSWER, logprobs=0, seed=i * samples)
        completions = generator.generate(prompts, rules)
        times.append(time.perf_counter())
        batch, reward = pack(prompts, answers, completions)
        times.append(time.perf_counter())
        placed = step.shard(batch)
        differences = []
        for _ in range(options.updates):
            state, (_, difference) = step(state, placed)
            differences.append(float(difference))
        generator.update_params(state.params)
        times.append(time.perf_counter())
        seconds = (later - earlier for earlier, later in itertools.pairwise(times))
        yield reward, differences[0], dict(zip(("rollout", "scoring", "update"), seconds, strict=True))


def plot(path: Path, rewards: list[float]) -> None:
    """Draws the rewards, and their mean over ten steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(rewards, lw=0.5, label="a step")
    means = np.convolve(rewards, np.full(10, 0.1), "valid") if len(rewards) >= 10 else rewards
    axes.plot(np.arange(len(means)) + len(rewards) - len(means), means, label="mean of ten")
    axes.set(xlabel="step", ylabel="share of right digits", ylim=(0, 1), title="GRPO: sums of two digits")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")
    plt.close(figure)


def run(options: Options) -> None:
    """Trains and prints."""
    rewards, seconds = [], dict.fromkeys(("rollout", "scoring", "update"), 0.0)
    print("step   reward   sampler - model   seconds")
    for i, (reward, difference, of_step) in enumerate(train(options)):
        rewards.append(reward)
        if i:  # the first step compiles
            seconds = {name: seconds[name] + of_step[name] for name in seconds}
        if i % 10 == 0 or i == options.steps - 1:
            print(
                f"{i:4}{np.mean(rewards[-10:]):9.3f}{difference:18.1e}{sum(of_step.values()):10.2f}",
                flush=True,
            )
    shares = (f"{name} {of_part / max(sum(seconds.values()), 1e-9):.0%}" for name, of_part in seconds.items())
    print(f"time: {', '.join(shares)}")
    plot(options.out / "reward.png", rewards)
    print(f"picture: {options.out / 'reward.png'}")


@program(lower="--prompts, --group or --hidden-size")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check_numbers(options)
    with lock_folder(options.out):
        run(options)


if __name__ == "__main__":
    main()
