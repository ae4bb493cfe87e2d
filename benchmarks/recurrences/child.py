"""What a process of ops.py does: time, memory and errors of one implementation after another.

Errors come after the times, so that no tuning is for their shape.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from records import versions
from running.processes import Job, serve
from running.tuning import compile_only

from recurrences.errors import errors
from recurrences.peers import IMPLEMENTATIONS, Task, our_name
from recurrences.sides import Jax, Torch


def plain(x: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Numbers with the digits that mean something; JSON has no NaN."""
    bad = [name for name, a in x.items() if isinstance(a, float) and not math.isfinite(a)]
    if bad:
        notes.append(f"not finite: {', '.join(bad)}")
    return {
        name: None if name in bad else float(f"{a:.4g}") if isinstance(a, float) else a
        for name, a in x.items()
    }


class Runner:
    """The jobs of a process, in order; inputs and errors that the next job needs as well are kept."""

    def __init__(self, settings: dict[str, Any]):
        self.prepare, self.check = settings["prepare"], settings["checked"]
        if self.prepare and settings["shares"]:
            compile_only(*settings["shares"])
        self.side: Any = None
        self.inputs: tuple[Any, Any] = (None, None)
        self.errors: dict[Any, Any] = {}

    def run(self, job: Job) -> dict[str, Any] | None:
        """The record of a job, as far as its process knows it."""
        key, task = job["implementation"], Task(**job["task"])
        implementation = IMPLEMENTATIONS[key]
        self.side = self.side or {"jax": Jax, "torch": Torch}[implementation.framework]()
        side, call = self.side, implementation.load(task)
        if self.prepare and implementation.package != "fla":  # its loader has compiled
            return None
        if self.prepare:  # enough that the kernels are specialised as they will be
            task = dataclasses.replace(task, shape=(2, min(task.shape[1], 4096), *task.shape[2:]))
            side.function(implementation, task, call)(*side.arrays(implementation, task))
            return None
        function = side.function(implementation, task, call)
        kind = (
            task.version,
            task.shape,
            task.dtype,
            task.decay == "any-strong",
            implementation.raw_decay,
            implementation.value_first,
            implementation.state_dtype,
        )
        if task.form == "decode":
            self.inputs = (None, None)
            result = side.decode(implementation, task, call)
        else:
            if self.inputs[0] != kind:
                self.inputs = (None, None)  # let go of the old ones first
                self.inputs = (kind, side.arrays(implementation, task))
            result = side.measure(function, self.inputs[1])
        if implementation.prepare:
            result["first_call_s"] = None  # part of it was done before
        notes = [implementation.note] if implementation.note else []
        checked = (key, task.op, task.dtype, task.decay, task.shape[3:])
        if self.check and key != "copy" and checked not in self.errors:
            self.errors[checked] = errors(side, implementation, task)
        ours = key.startswith("ours")
        return {
            "implementation": (key.partition(" ")[2] or our_name(task)) if ours else implementation.name,
            "library": implementation.package,
            **plain({"peak_gb": None, **result}, notes),
            "errors": plain(self.errors.get(checked, {}), notes),
            "versions": versions(implementation.distributions),
            "device": side.device,
            "note": "; ".join(notes) or None,
        }


if __name__ == "__main__":
    serve(lambda settings: Runner(settings).run)
