"""A process of train_step.py: one side's step, or what is compiled for it before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers import fla_model, rwkv_lm, torch_training, tuning
from records import versions
from runner import Job

from steps import ours
from steps.measuring import with_share
from steps.sizes import Size

SIDES = {"fla_jax": ours.train, "rwkv-lm": rwkv_lm.train, "fla": fla_model.train}


def train(job: Job) -> dict[str, Any]:
    """The record of a side, as far as its process knows it."""
    size = Size(**job["size"])
    packages = ours.PACKAGES if job["side"] == "fla_jax" else torch_training.PACKAGES
    return {**with_share(SIDES[job["side"]](size, job), size), "versions": versions(packages)}


def compile_share(job: Job) -> None:
    """Fills the caches with this process's share of what the side compiles."""
    if job["side"] == "rwkv-lm":
        rwkv_lm.compile_share(job["checkout"], *job["shares"])
    else:
        tuning.compile_only(*job["shares"])
        # kernels do not depend on the number of layers or the batch
        size = Size(**{**job["size"], "layers": 2, "batch": 2})
        fla_model.train(size, {**job, "warmup": 0, "steps": 1})


def make(settings: dict[str, Any]) -> Callable[[Job], Any]:
    return compile_share if settings["compile"] else train
