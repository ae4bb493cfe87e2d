"""A process of ops.py: time and memory, then errors, of one implementation after another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from peers.ops import IMPLEMENTATIONS, Task, is_cached, our_name
from peers.tuning import compile_only
from records import versions
from runner import Job

from recurrences.errors import errors
from recurrences.frameworks import Jax, Torch


def as_json(x: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Numbers with their significant digits; what is not finite becomes None and a note."""
    bad = [name for name, a in x.items() if isinstance(a, float) and not math.isfinite(a)]
    if bad:
        notes.append(f"not finite: {', '.join(bad)}")
    rounded = {name: float(f"{a:.4g}") if isinstance(a, float) else a for name, a in x.items()}
    return {name: None if name in bad else a for name, a in rounded.items()}


class Worker:
    """Runs jobs in order and keeps inputs and errors that the next job needs as well."""

    def __init__(self, settings: dict[str, Any]):
        self.prepare, self.check = settings["prepare"], settings["checked"]
        if self.prepare and settings["shares"]:
            compile_only(*settings["shares"])
        self.framework: Any = None
        self.inputs: tuple[Any, Any] = (None, None)
        self.errors: dict[Any, Any] = {}

    def run(self, job: Job) -> dict[str, Any] | None:
        """The record of a job, as far as its process knows it."""
        key, task = job["implementation"], Task(**job["task"])
        implementation = IMPLEMENTATIONS[key]
        self.framework = self.framework or {"jax": Jax, "torch": Torch}[implementation.framework]()
        framework, call = self.framework, implementation.load(task)
        if self.prepare:
            if implementation.cached:
                framework.compile(implementation, task, call)
            elif implementation.package == "fla":  # loaders of the others have compiled
                # enough that the kernels are specialised as they will be
                task = dataclasses.replace(task, shape=(2, min(task.shape[1], 4096), *task.shape[2:]))
                run = framework.function(implementation, task, call)
                run(*framework.arrays(implementation, task))
            return None
        function = framework.function(implementation, task, call)
        conventions = (implementation.raw_decay, implementation.value_first, implementation.state_dtype)
        kind = (task.version, task.shape, task.dtype, task.decay == "any-strong", *conventions)
        if task.form == "decode":
            self.inputs = (None, None)
            result = framework.decode(implementation, task, call)
        else:
            if self.inputs[0] != kind:
                self.inputs = (None, None)  # free the old ones first
                self.inputs = (kind, framework.arrays(implementation, task))
            result = framework.measure(function, self.inputs[1])
        if implementation.prepare or is_cached((key, task)):
            result["first_call_s"] = None  # part of it was done before
        notes = [implementation.note] if implementation.note else []
        checked = (key, task.op, task.dtype, task.precision, task.decay, task.shape[3:])
        if self.check and key != "copy" and checked not in self.errors:
            self.errors[checked] = errors(framework, implementation, task)
        ours = key.startswith("ours")
        return {
            "implementation": (key.partition(" ")[2] or our_name(task)) if ours else implementation.name,
            "library": implementation.package,
            **as_json({"peak_gb": None, **result}, notes),
            "errors": as_json(self.errors.get(checked, {}), notes),
            "versions": versions(implementation.distributions),
            "device": framework.device,
            "note": "; ".join(notes) or None,
        }


def make(settings: dict[str, Any]) -> Callable[[Job], Any]:
    return Worker(settings).run
