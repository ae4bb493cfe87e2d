"""What a process of benchmarks/ops.py does: inputs, time, memory and errors of one implementation after
another, one JSON line each.

Time: the call is warm, N calls are queued and waited for once (JAX: ``block_until_ready``; torch: events
around them), the median of several such times is kept; N and the repetitions are the same for both. Memory is
what a call needs beyond its inputs, its outputs (and gradients) included: JAX's compiler says it
(``memory_analysis``: temporaries and outputs), torch's allocator counts it (peak allocation in a call less
the allocation before). Errors: relative Frobenius norm against the float64 recurrence of tests/oracle.py on
the same rounded inputs, B1 T128 H2, after the times, so that no tuning is for this shape. ``first_call_s``:
tracing, compilation and one run, less than a fresh process needs where an earlier measurement compiled the
same kernels.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from peers import IMPLEMENTATIONS, Implementation, Task, our_name
from records import versions
from tuning import compile_only

CHECKED = (1, 128, 2)
DECODE_STEPS = 32
NAMES = {6: ("r", "k", "v", "w", "u", "initial_state"), 7: ("r", "w", "k", "v", "a", "b", "initial_state")}


def draw(task: Task, m: Any, normal: Callable[..., Any], uniform: Callable[..., Any]) -> dict[str, Any]:
    """Inputs and cotangents in float32; ``m`` is numpy, jax.numpy or torch. RWKV-7: kk of length one, a =
    -kk, b = kk * gate.
    """
    B, T, H, K, V = task.shape
    x = {name: normal(B, T, H, K) for name in ("r", "k", "w")}
    # what the RWKV-7 layer can pass, or RWKV-6's exp of anything, down to e^-1000
    x["w"] = -m.exp(2 * x["w"]) if task.decay == "any-strong" else -math.exp(-0.5) / (1 + m.exp(-x["w"]))
    if task.version == 6:
        x["u"] = normal(H, K)
    else:
        kk = normal(B, T, H, K)
        kk = kk / m.sqrt((kk * kk).mean(-1) * K)[..., None]
        x.update(a=-kk, b=kk * uniform(B, T, H, K))
    return {
        **x,
        "v": normal(B, T, H, V),
        "do": normal(B, T, H, V),
        "initial_state": normal(B, H, K, V),
        "ds": normal(B, H, K, V),
    }


def conventions(
    implementation: Implementation, x: dict[str, Any], m: Any, cast: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """The arrays as the implementation takes them: decay, orientation of the states, dtypes."""
    x = dict(x)
    if implementation.raw_decay:
        x["w"] = m.log(-x["w"])
    if implementation.value_first:
        x.update({name: m.swapaxes(x[name], -1, -2) for name in ("initial_state", "ds")})
    return {
        name: cast(a, implementation.state_dtype if name in ("initial_state", "ds") else "bfloat16")
        for name, a in x.items()
    }


def split(task: Task, x: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    return {name: x[name] for name in NAMES[task.version]}, x["do"], x["ds"]


def plan_calls(first_ms: float) -> tuple[int, int]:
    """(calls queued, repetitions): about 0.15 s each, fewer of what is slow."""
    return min(max(math.ceil(150 / max(first_ms, 1e-3)), 3), 50), 5 if first_ms < 200 else 3


def timed(run: Callable[[int], float]) -> float:
    """Median milliseconds of a call; ``run(n)`` gives the milliseconds of n."""
    run(1)
    n, repetitions = plan_calls(run(2) / 2)
    return statistics.median(run(n) / n for _ in range(repetitions))


class Jax:
    """JAX's side: the call is compiled ahead, so that its memory is known."""

    def __init__(self):
        import jax

        self.jax, self.device = jax, jax.devices()[0].device_kind

    def arrays(self, implementation: Implementation, task: Task) -> Any:
        jax, jnp = self.jax, self.jax.numpy
        keys = iter(jax.random.split(jax.random.key(0), 16))
        cast = jax.jit(lambda x: conventions(implementation, x, jnp, lambda a, dtype: a.astype(dtype)))
        return split(
            task,
            cast(
                draw(
                    task,
                    jnp,
                    lambda *s: jax.random.normal(next(keys), s),
                    lambda *s: jax.random.uniform(next(keys), s),
                )
            ),
        )

    def from_numpy(self, x: Any) -> Any:
        return self.jax.tree.map(self.jax.numpy.asarray, x)

    def to_numpy(self, x: Any) -> Any:
        return self.jax.tree.map(lambda a: np.asarray(a).astype(np.float64), x)

    def function(
        self, implementation: Implementation, task: Task, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        def backward(x, do, ds):
            (o, final), pull = self.jax.vjp(call, x)
            return (o, final), pull(
                (
                    do,
                    None
                    if final is None
                    else ds
                    if implementation.final_cotangent
                    else self.jax.numpy.zeros_like(ds),
                )
            )[0]

        return self.jax.jit(backward if task.backward else lambda x, do, ds: (call(x), {}))

    def measure(self, function: Callable[..., Any], inputs: Any) -> dict[str, Any]:
        began = time.perf_counter()
        compiled = function.lower(*inputs).compile()
        self.jax.block_until_ready(compiled(*inputs))
        first = time.perf_counter() - began

        def run(n: int) -> float:
            began = time.perf_counter()
            for _ in range(n):
                result = compiled(*inputs)
            self.jax.block_until_ready(result)
            return 1e3 * (time.perf_counter() - began)

        ms, planned = timed(run), compiled.memory_analysis()
        peak = None if planned is None else (planned.temp_size_in_bytes + planned.output_size_in_bytes) / 1e9
        return {
            "ms": ms,
            "peak_gb": peak,
            "peak_from": "compiler: temporaries and outputs",
            "first_call_s": first,
        }

    def decode(self, implementation: Implementation, task: Task, call: Callable[..., Any]) -> dict[str, Any]:
        """A step of a jitted loop over tokens whose state is donated."""
        jax, jnp = self.jax, self.jax.numpy
        B, _, H, K, V = task.shape
        x, _, _ = self.arrays(implementation, dataclasses.replace(task, shape=(B, DECODE_STEPS, H, K, V)))
        state, fixed = x.pop("initial_state"), {name: x.pop(name) for name in ("u",) if name in x}
        tokens = jax.jit(lambda x: {name: jnp.moveaxis(a, 1, 0)[:, :, None] for name, a in x.items()})(x)
        del x

        def step(state, token):
            o, state = call({**token, **fixed, "initial_state": state})
            return state, o

        loop = jax.jit(lambda state, tokens: jax.lax.scan(step, state, tokens), donate_argnums=0)
        began = time.perf_counter()
        state, _ = jax.block_until_ready(loop(state, tokens))
        first = time.perf_counter() - began

        def run(n: int) -> float:
            nonlocal state
            began = time.perf_counter()
            for _ in range(n):
                state, o = loop(state, tokens)
            jax.block_until_ready((state, o))
            return 1e3 * (time.perf_counter() - began)

        return {"ms": timed(run) / DECODE_STEPS, "first_call_s": first}


class Torch:
    """torch's side; one CUDA device or an error."""

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        self.torch, self.device = torch, torch.cuda.get_device_name()

    def _cast(self, a: Any, dtype: str) -> Any:
        return a.to(getattr(self.torch, dtype)).contiguous()

    def arrays(self, implementation: Implementation, task: Task) -> Any:
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(0)
        of = lambda draws: lambda *shape: draws(shape, generator=generator, device="cuda")
        return split(
            task,
            conventions(
                implementation, draw(task, torch, of(torch.randn), of(torch.rand)), torch, self._cast
            ),
        )

    def from_numpy(self, x: Any) -> Any:
        arrays, do, ds = x
        there = lambda a: self._cast(self.torch.from_numpy(a.astype(np.float32)).cuda(), a.dtype.name)
        return {name: there(a) for name, a in arrays.items()}, there(do), there(ds)

    def to_numpy(self, x: Any) -> Any:
        (o, final), grads = x
        back = lambda a: a.detach().double().cpu().numpy()
        return (back(o), back(final)), {name: back(g) for name, g in grads.items()}

    def function(
        self, implementation: Implementation, task: Task, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        torch = self.torch

        def run(x, do, ds):
            if not task.backward:
                with torch.no_grad():
                    return call(x), {}
            leaves = {name: a.detach().requires_grad_() for name, a in x.items()}
            o, final = call(leaves)
            results, cotangents = ((o, final), (do, ds)) if implementation.final_cotangent else ((o,), (do,))
            return (o, final), dict(
                zip(leaves, torch.autograd.grad(results, list(leaves.values()), cotangents))
            )

        return run

    def measure(self, function: Callable[..., Any], inputs: Any) -> dict[str, Any]:
        torch = self.torch
        began = time.perf_counter()
        function(*inputs)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*inputs)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9

        def run(n: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(n):
                function(*inputs)
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end)

        return {
            "ms": timed(run),
            "peak_gb": peak,
            "peak_from": "allocator: peak in a call",
            "first_call_s": first,
        }

    def decode(self, implementation: Implementation, task: Task, call: Callable[..., Any]) -> dict[str, Any]:
        """A call with one token: there is no loop on the device."""
        return self.measure(self.function(implementation, task, call), self.arrays(implementation, task))


def relative(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def errors(side: Any, implementation: Implementation, task: Task) -> dict[str, Any]:
    """Errors on the small shape, after the inputs were rounded as the implementation takes them."""
    import oracle

    backward = implementation.backward
    small = dataclasses.replace(
        task, shape=(*CHECKED, *task.shape[3:]), passes="fwd+bwd" if backward else "fwd"
    )
    rng = np.random.default_rng(1)
    drawn = draw(small, np, lambda *s: rng.standard_normal(s), lambda *s: rng.uniform(size=s))
    cast = lambda a, dtype: np.ascontiguousarray(a).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    inputs = split(small, conventions(implementation, drawn, np, cast))
    (o, final), grads = side.to_numpy(
        side.function(implementation, small, implementation.load(small))(*side.from_numpy(inputs))
    )

    x, do, ds = (
        {name: a.astype(np.float64) for name, a in inputs[0].items()},
        *(a.astype(np.float64) for a in inputs[1:]),
    )
    turn = (lambda a: a.swapaxes(-1, -2)) if implementation.value_first else lambda a: a
    raw = x["w"]
    x["w"] = -np.exp(raw) if implementation.raw_decay else raw
    x["initial_state"], ds = turn(x["initial_state"]), turn(ds) * implementation.final_cotangent
    if backward and not implementation.states_backward:
        x["initial_state"], ds = np.zeros_like(ds), np.zeros_like(ds)
    out, *rest = getattr(oracle, small.op.split("_")[-1])(*x.values(), *((do, ds) if backward else ()))
    found: dict[str, Any] = {
        "o": relative(o, out[0]),
        "final_state": None if final is None else relative(turn(final), out[1]),
    }
    found |= {"worst_gradient": None, "dw": None}
    if backward:
        want = dict(zip(x, rest[0]))
        if implementation.raw_decay:
            want["w"] = want["w"] * x["w"]
        if implementation.states_backward:
            grads["initial_state"] = turn(grads["initial_state"])
        else:
            del want["initial_state"]
        each = {name: relative(grads[name], g) for name, g in want.items()}
        worst = max(each, key=lambda name: math.inf if math.isnan(each[name]) else each[name])
        found |= {"worst_gradient": each[worst], "worst_of": f"d{worst}", "dw": each["w"]}
    return found


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

    def __init__(self):
        self.side: Any = None
        self.inputs: tuple[Any, Any] = (None, None)
        self.errors: dict[Any, Any] = {}

    def run(self, key: str, task: Task, prepare: bool, check: bool) -> dict[str, Any] | None:
        """The record of a job, as far as its process knows it."""
        implementation = IMPLEMENTATIONS[key]
        self.side = self.side or {"jax": Jax, "torch": Torch}[implementation.framework]()
        side, call = self.side, implementation.load(task)
        if prepare and implementation.package != "fla":  # its loader has compiled
            return None
        if prepare:  # enough that the kernels are specialised as they will be
            task = dataclasses.replace(task, shape=(2, min(task.shape[1], 4096), *task.shape[2:]))
            side.function(implementation, task, call)(*side.arrays(implementation, task))
            return None
        function = side.function(implementation, task, call)
        kind = (
            task.version,
            task.shape,
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
        checked = (key, task.op, task.decay, task.shape[3:])
        if check and key != "copy" and checked not in self.errors:
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


def main(jobs_file: str, results_file: str) -> None:
    """Runs the jobs of a file; says what it begins, then what came of it, line by line."""
    spec = json.loads(Path(jobs_file).read_text())
    runner = Runner()
    if spec["prepare"] and spec["shares"]:
        compile_only(*spec["shares"])
    with open(results_file, "a") as out:
        say = lambda line: print(json.dumps(line), file=out, flush=True)
        for job in spec["jobs"]:
            say({"began": job["id"]})
            began = time.perf_counter()
            try:
                record = runner.run(
                    job["implementation"], Task(**job["task"]), spec["prepare"], spec["checked"]
                )
            except Exception as error:  # recorded, whatever it is
                traceback.print_exc()
                say({"id": job["id"], "error": f"{type(error).__name__}: {error}"[:600]})
                if any(word in str(error) for word in ("CUDA error", "CUDA_ERROR", "illegal")):
                    sys.exit(1)  # the device is lost to this process: another one does the rest
                continue
            say({"id": job["id"], "record": record, "took_s": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main(*sys.argv[1:])
