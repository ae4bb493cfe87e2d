"""What a process of train_step.py does: one side's step, or what is compiled for it before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from records import versions
from running import tuning
from running.processes import Job, serve

from steps import fla_model, ours, rwkv_lm, torch_training
from steps.measuring import with_share
from steps.rows import Row

SIDES = {"fla_jax": ours.train, "rwkv-lm": rwkv_lm.train, "fla": fla_model.train}


def train(job: Job) -> dict[str, Any]:
    """The record of a side, as far as its process knows it."""
    row = Row(**job["row"])
    packages = ours.PACKAGES if job["side"] == "fla_jax" else torch_training.PACKAGES
    result = with_share(SIDES[job["side"]](row, job), row)
    return {**result, "versions": versions(packages)}


def compile_(job: Job) -> None:
    """Fills the caches with this process's share of what the side compiles."""
    if job["side"] == "rwkv-lm":
        rwkv_lm.compile_share(job["checkout"], *job["shares"])
    else:
        tuning.compile_only(*job["shares"])
        # kernels are specialised as they will be; how many layers and rows there are makes no difference
        row = {**job["row"], "layers": 2, "batch": 2}
        fla_model.train(Row(**row), {**job, "warmup": 0, "steps": 1})


def make(settings: dict[str, Any]) -> Callable[[Job], Any]:
    return compile_ if settings["compile"] else train


if __name__ == "__main__":
    serve(make)
