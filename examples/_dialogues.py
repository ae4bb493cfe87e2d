"""Questions and answers: read, tokenized, packed into sequences of which answers alone are learned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _cli import about

from fla_jax.data import JsonLines
from fla_jax.generation import Turn

Dialogue = tuple[list[int], list[int]]  # tokens, and which of them are learned
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens [B, T + 1], mask [B, T], segment_ids [B, T + 1]


def read(
    path: Path, tokenizer: Any, template: Any, size: int, seed: int
) -> tuple[list[Dialogue], list[Dialogue]]:
    """Dialogues of at most ``size`` tokens, in random order: a tenth to hold out, and the rest."""
    with about(f"--data: {path}", "read"):
        lines = JsonLines(path)
        fields = [lines[int(i)] for i in np.random.default_rng(seed).permutation(len(lines))]
    if lost := next((name for one in fields for name in ("prompt", "answer") if name not in one), None):
        raise ValueError(f"--data: every line must have prompt and answer, got one without {lost}")
    for one in fields:
        for name in ("prompt", "answer"):
            if not isinstance(one[name], str):
                raise ValueError(f"--data: every {name} must be text, got {one[name]!r}")
    if (held := len(fields) // 10) == 0:
        raise ValueError(f"--data: {len(fields)} dialogues are too few: a tenth of them is held out")
    dialogues = [tokenized(tokenizer, template, one["prompt"], one["answer"], size) for one in fields]
    parts = dialogues[:held], dialogues[held:]
    for name, part in zip(("held-out", "training"), parts, strict=True):
        if not any(sum(learned) for _, learned in part):
            raise ValueError(
                f"--sequence {size - 1} cuts off the answers of all {len(part)} {name} dialogues"
            )
    return parts


def tokenized(tokenizer: Any, template: Any, prompt: str, answer: str, size: int) -> Dialogue:
    """A dialogue as `fla_jax.serve` reads it; only the answer and the end token are learned."""
    turns, end = [Turn("user", prompt)], tokenizer.end_of_text
    question = tokenizer.encode(template(turns))
    answered = tokenizer.encode(template.answer(turns, answer))
    # generation ends at the first end token, be it the template's
    learned = [*itertools.takewhile(lambda token: token != end, answered), end]
    return (question + learned)[:size], ([0] * len(question) + [1] * len(learned))[:size]


def packed(dialogues: list[Dialogue], length: int, batch: int) -> Batch:
    """Dialogues one behind the other in sequences of ``length`` labels, a multiple of ``batch`` of these.

    What is left of a sequence has segment 0 and is masked.
    """
    rows: list[list[Dialogue]] = [[]]
    for one in dialogues:
        if sum(len(tokens) for tokens, _ in rows[-1]) + len(one[0]) > length + 1:
            rows.append([])
        rows[-1].append(one)
    tokens, learned, ids = np.zeros((3, -(-len(rows) // batch) * batch, length + 1), np.int32)
    for i, row in enumerate(rows):
        at = 0
        for number, (values, is_learned) in enumerate(row, 1):
            here = slice(at, at := at + len(values))
            tokens[i, here], learned[i, here], ids[i, here] = values, is_learned, number
    return tokens, np.float32(learned[:, 1:] * (ids[:, 1:] == ids[:, :-1])), ids


def batches(packed: Batch, size: int, seed: tuple[int, int] | None = None) -> Iterator[Batch]:
    """Batches of ``size`` packed sequences, in random order with a seed."""
    number = len(packed[0])
    order = np.arange(number) if seed is None else np.random.default_rng(seed).permutation(number)
    for rows in order.reshape(-1, size):
        yield packed[0][rows], packed[1][rows], packed[2][rows]
