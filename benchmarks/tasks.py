"""Accuracy on two published synthetic tasks: ``python benchmarks/tasks.py``, in minutes on one GPU.

``recall``: multi-query associative recall (Arora et al. 2023, "Zoology", section 4). A sequence begins with
pairs of a key and a value; each key comes once more later, and the model must answer with its value.

``S5``, ``A5``: products in a group (Merrill et al. 2024, "The illusion of state", section 5). The model reads
elements of the group and must name, at each position, the product of all elements so far.

The RWKV-7 paper (Peng et al. 2025, arXiv:2503.14456, section 8) has both: the accuracy of recall by width and
number of pairs, and the number of layers that a group needs. Each step draws new sequences; accuracy is
measured on sequences of another random key. Training ends early at 99 %, and for recall the best of two
learning rates counts, both as in Zoology.

    python benchmarks/tasks.py --only "recall.* rwkv7 64"    settings whose name matches
    python benchmarks/tasks.py --steps 16000 --rates 1e-3    other steps and learning rates
    python benchmarks/tasks.py --no-curriculum               recall has all pairs from the first step
    python benchmarks/tasks.py --decay-shift -6              a state that lasts longer at the start
    python benchmarks/tasks.py --quick                       tiny sizes on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from flax import linen as nn

from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM, initial_params
from fla_jax.training import cross_entropy, parameter_groups, rwkv_optimizer, rwkv_schedule

MODELS = {"rwkv6": (RWKV6ForCausalLM, RWKV6Config), "rwkv7": (RWKV7ForCausalLM, RWKV7Config)}
GAPS_POWER = 0.01  # queries soon after the pairs are likelier: Zoology's distribution of gaps
RECALL_VOCABULARY = 8192  # the lower half are keys, the upper half values, 0 fills
RECALL_BATCH = {64: 512, 128: 512, 256: 256, 512: 128, 1024: 64, 2048: 64}  # Zoology's, by length
# The stages of a curriculum have a 32nd, then an eighth of the length and of the pairs; they share the first
# quarter of the steps.
CURRICULUM, CURRICULUM_SHARE = (32, 8), 0.25
SOLVED = 0.99  # Zoology and Merrill et al. stop here
KEY = records.key_of("op", "form", "implementation", "model", "shape")
STEPS_PER_CALL = 500
State = tuple[optax.Params, optax.OptState]
Batch = dict[str, jax.Array]
Draw = Callable[[jax.Array], Batch]
Answer = Callable[[optax.Params, Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A task, its size, and the model that learns it.

    Attributes:
        task: ``"recall"``, ``"S5"`` or ``"A5"``.
        model: ``"rwkv6"`` or ``"rwkv7"``.
        length: tokens of a sequence.
        pairs: of keys and values; 0 for a group.
        vocab_size: tokens of recall; a group has one for each element and one that begins the sequence.
        steps: most steps of a learning rate.
        learning_rates: tried in this order until one is above `SOLVED`.
        rate_scale: RWKV-7's factor on the in-context rate; 2 allows eigenvalues down to -1.
        tie_embeddings: whether the head is the transposed embedding, as in Zoology; docs/tasks.md compares.
        curriculum: divisors of length and pairs, by which recall begins with less of both, see `CURRICULUM`.
        decay_shift: added at the start to the base of the decay, RWKV-7's ``w0`` and RWKV-6's ``time_decay``,
            which is about the logarithm of the rate of decay.
    """

    task: str
    model: str
    hidden_size: int
    num_layers: int
    length: int
    pairs: int = 0
    head_dim: int = 64
    batch: int = 128
    steps: int = 4000
    vocab_size: int = RECALL_VOCABULARY
    rate_scale: float = 1.0
    tie_embeddings: bool = False
    curriculum: tuple[int, ...] = ()
    decay_shift: float = 0.0
    learning_rates: tuple[float, ...] = (2.2e-3, 1e-3)

    @property
    def name(self) -> str:
        pairs = f" {self.pairs} pairs" if self.pairs else ""
        return f"{self.task} {self.length}{pairs} {self.model} {self.hidden_size}x{self.num_layers}"


def settings(quick: bool) -> list[Setting]:
    """The paper's sizes: (length, pairs) by width for recall, lengths by layers for groups."""
    if quick:
        sizes = dict(hidden_size=32, num_layers=2, length=16, pairs=2, head_dim=16, batch=16, vocab_size=16)
        small = Setting("recall", "rwkv7", **sizes, steps=300, tie_embeddings=True, learning_rates=(1e-2,))
        group = dataclasses.replace(
            small, task="S5", length=4, pairs=0, steps=40, rate_scale=2.0, tie_embeddings=False
        )
        return [small, dataclasses.replace(small, model="rwkv6"), group]
    pairs_by_length = ((64, 4), (128, 8), (256, 16), (512, 64), (1024, 128), (2048, 256))
    recalls = [
        Setting(
            *("recall", model, width, 2, length, pairs),
            batch=RECALL_BATCH[length],
            tie_embeddings=True,
            curriculum=CURRICULUM if pairs >= 64 else (),
        )
        for model, width, (length, pairs) in itertools.product(MODELS, (64, 128, 256, 512), pairs_by_length)
    ]
    groups = [
        Setting(
            *(group, model, 128, layers, length),
            batch=512,
            steps=40_000,
            rate_scale=2.0,
            learning_rates=(1e-3,),
        )
        for group, model, layers, length in itertools.product(("A5", "S5"), MODELS, (1, 2, 3, 4), (8, 16, 32))
    ]
    return recalls + groups


def recall(key: jax.Array, batch: int, length: int, pairs: int, vocab_size: int) -> Batch:
    """Sequences of recall: tokens [batch, length], positions of queries and their labels [batch, pairs]."""
    half, space = vocab_size // 2, (length - 2 * pairs) // 2
    keys, values, places = jax.random.split(key, 3)

    def distinct(key: jax.Array, log_weights: jax.Array) -> jax.Array:
        """For each sequence ``pairs`` different indices, drawn one after the other by their weights."""
        noise = jax.random.gumbel(key, (batch, log_weights.shape[0]))
        return jax.lax.top_k(log_weights + noise, pairs)[1]

    keys = 1 + distinct(keys, jnp.zeros(half - 1))
    values = half + distinct(values, jnp.zeros(half))
    gaps = distinct(places, (GAPS_POWER - 1) * jnp.log(jnp.arange(1, space + 1)))
    rows, queries = jnp.arange(batch)[:, None], 2 * pairs + 2 * gaps
    tokens = jnp.zeros((batch, length), keys.dtype)  # random fill would repeat keys with other values
    tokens = tokens.at[:, : 2 * pairs].set(jnp.stack([keys, values], -1).reshape(batch, -1))
    tokens = tokens.at[rows, queries].set(keys)
    return {"tokens": tokens, "positions": queries, "labels": values}


@functools.cache
def products(group: str) -> np.ndarray:
    """The table [n, n] of a group: entry [a, b] is the permutation b after a."""
    elements = [p for p in itertools.permutations(range(5)) if group == "S5" or _is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return np.array([[number[tuple(b[i] for i in a)] for b in elements] for a in elements])


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p))) % 2 == 0


def words(key: jax.Array, batch: int, length: int, group: str) -> Batch:
    """Elements of a group, tokens [batch, 1 + length], and their products up to each, labels [batch, length].

    The first token, as in Merrill et al., has no label: there a model can write the identity into its state.
    """
    table = jnp.asarray(products(group))
    tokens = jax.random.randint(key, (batch, length), 0, len(table))

    def step(product: jax.Array, element: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = table[product, element]
        return product, product

    identity = jnp.zeros(batch, tokens.dtype)  # the first permutation in order
    labels = jax.lax.scan(step, identity, tokens.T)[1].T
    positions = jnp.broadcast_to(1 + jnp.arange(length), (batch, length))
    tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=len(table))
    return {"tokens": tokens, "positions": positions, "labels": labels}


def sampler(setting: Setting, divisor: int = 1) -> Draw:
    """The function that draws a setting's batches; ``divisor`` divides recall's length and pairs.

    Shorter sequences come in the batches of their length.
    """
    if setting.pairs:
        pairs = max(1, setting.pairs // divisor)
        length = max(setting.length // divisor, 4 * pairs)
        batch = setting.batch if divisor == 1 else RECALL_BATCH.get(max(64, length), setting.batch)
        return jax.jit(lambda key: recall(key, batch, length, pairs, setting.vocab_size))
    return jax.jit(lambda key: words(key, setting.batch, setting.length, setting.task))


def train(setting: Setting, learning_rate: float) -> records.Record:
    """Shares of right answers and of sequences without an error, the steps and the seconds of training."""
    kind, config_type = MODELS[setting.model]
    vocab_size = setting.vocab_size if setting.pairs else len(products(setting.task)) + 1
    sizes = dict(hidden_size=setting.hidden_size, num_layers=setting.num_layers, head_dim=setting.head_dim)
    options = {"rate_scale": setting.rate_scale} if setting.model == "rwkv7" else {}
    model = kind(
        config_type(vocab_size=vocab_size, tie_embeddings=setting.tie_embeddings, **sizes, **options)
    )
    schedule = rwkv_schedule(learning_rate, 0.01 * learning_rate, setting.steps, setting.steps // 10)
    optimizer = rwkv_optimizer(schedule, weight_decay=0.1 if setting.pairs else 0.0)
    answer = functools.partial(logits, model)

    def loss(params: optax.Params, batch: Batch) -> jax.Array:
        return cross_entropy(answer(params, batch), batch["labels"], l2wrap=0.0)

    def step(draw: Draw, state: State, key: jax.Array) -> tuple[State, None]:
        params, opt_state = state
        grads = jax.grad(loss)(params, draw(key))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def steps(draw: Draw) -> Callable[[State, jax.Array], State]:
        # many steps a call: one alone is over before the next one is dispatched
        run = lambda state, keys: jax.lax.scan(functools.partial(step, draw), state, keys)[0]
        return jax.jit(run, donate_argnums=0)

    draw, divisors = sampler(setting), setting.curriculum
    # the steps of each stage, and the number of the step at which it ends
    stages = [
        (steps(sampler(setting, divisor)), int(setting.steps * CURRICULUM_SHARE * number / len(divisors)))
        for number, divisor in enumerate(divisors, 1)
    ] + [(steps(draw), setting.steps)]
    count, rounds = jax.jit(functools.partial(_count, answer, draw)), -(-2048 // setting.batch)
    params = shifted_params(model, setting.decay_shift)
    state, keys = (params, optimizer.init(params)), jax.random.split(jax.random.key(1), setting.steps)
    checks, done, began = jax.random.split(jax.random.key(2), setting.steps), 0, time.perf_counter()
    while done < setting.steps:
        run, until = next((run, until) for run, until in stages if done < until)
        end = min(done + STEPS_PER_CALL, until)
        state, done = run(state, keys[done:end]), end
        right = accuracy(count, state[0], checks[done - 1], rounds)[0]
        print(f"  rate {learning_rate:g}, {done} steps: {right:.2%}", flush=True)
        if right > SOLVED:
            break
    seconds = time.perf_counter() - began
    # new sequences: those of the last check decided when training ended
    answers, sequences = accuracy(count, state[0], jax.random.key(3), rounds)
    return {"accuracy": answers, "sequences": sequences, "steps": done, "seconds": seconds}


def shifted_params(model: nn.Module, decay_shift: float) -> optax.Params:
    """The model's first parameters, with ``decay_shift`` added to the base of the decay."""
    params = initial_params(model, jax.random.key(0))
    shift = {"decay_base": decay_shift}
    return jax.tree.map(lambda x, group: x + shift.get(group, 0), params, parameter_groups(params))


def logits(model: nn.Module, params: optax.Params, batch: Batch) -> jax.Array:
    """Logits of the positions that have labels, [batch, positions, vocab_size].

    At all positions of a recall sequence they would be most of the work.
    """
    hidden = model.apply({"params": params}, batch["tokens"], method="hidden")[0]
    hidden = jnp.take_along_axis(hidden, batch["positions"][..., None], axis=1)
    return model.apply({"params": params}, hidden, method="logits")


def _count(answer: Answer, draw: Draw, params: optax.Params, key: jax.Array) -> jax.Array:
    """Right answers, answers, sequences without an error, and sequences, [4], of one batch."""
    batch = draw(key)
    right = jnp.argmax(answer(params, batch), -1) == batch["labels"]
    whole = jnp.all(right, -1)
    return jnp.stack([jnp.sum(right), right.size, jnp.sum(whole), whole.size])


def accuracy(count: Callable, params: optax.Params, key: jax.Array, rounds: int) -> tuple[float, float]:
    """The shares of right answers and of sequences without an error, over new sequences."""
    right, answers, whole, sequences = sum(
        np.asarray(count(params, key)) for key in jax.random.split(key, rounds)
    )
    return float(right / answers), float(whole / sequences)


def measure(setting: Setting) -> records.Record:
    """The record of a setting: its best learning rate, or the first one above `SOLVED`."""
    found: dict[float, records.Record] = {}
    for rate in setting.learning_rates:
        found[rate] = train(setting, rate)
        if found[rate]["accuracy"] > SOLVED:
            break
    best = max(found, key=lambda rate: found[rate]["accuracy"])
    return {
        "op": "task",
        "form": f"{setting.task} {setting.length} {setting.pairs}".removesuffix(" 0"),
        "implementation": setting.model,
        "model": f"{setting.num_layers}x{setting.hidden_size}",
        "shape": dataclasses.asdict(setting),
        "learning_rate": best,
        **found[best],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--only", default="", help="a regular expression of settings' names")
    parser.add_argument("--steps", type=int, help="most steps of a learning rate; default: the setting's")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates; default: the setting's")
    text = "whether recall begins with fewer pairs; default: from 64 pairs on"
    parser.add_argument("--curriculum", action=argparse.BooleanOptionalAction, help=text)
    text = "added at the start to the base of the decay; negative: a state lasts longer"
    parser.add_argument("--decay-shift", type=float, default=0.0, help=text)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    chosen = [setting for setting in settings(options.quick) if re.search(options.only, setting.name)]
    chosen = [dataclasses.replace(setting, decay_shift=options.decay_shift) for setting in chosen]
    if options.steps:
        chosen = [dataclasses.replace(setting, steps=options.steps) for setting in chosen]
    if options.rates:
        chosen = [dataclasses.replace(setting, learning_rates=tuple(options.rates)) for setting in chosen]
    if options.curriculum is not None:
        chosen = [
            dataclasses.replace(setting, curriculum=CURRICULUM * options.curriculum)
            if setting.pairs
            else setting
            for setting in chosen
        ]
    if not chosen:
        parser.error(f"--only {options.only!r} matches no setting")
    device = jax.devices()[0].device_kind
    common = {"device": device, "versions": records.versions(("jax", "jaxlib", "triton", "flax", "optax"))}
    for setting in chosen:
        record = measure(setting) | common | records.stamp()
        path = records.put(options.out, device, [record], KEY)  # at once: a run may be cut off
        found = f"{record['accuracy']:7.2%} right, {record['sequences']:7.2%} of sequences without an error"
        trained = f"rate {record['learning_rate']:g}, {record['steps']} steps, {record['seconds']:.0f} s"
        print(f"{setting.name:40} {found}, {trained}", flush=True)
    print(f"results: {path}")


if __name__ == "__main__":
    main()
