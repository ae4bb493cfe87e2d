"""JAX's and torch's side of a measurement: arrays, functions, time (`timing`) and memory.

Memory is what a call needs beyond its inputs: by JAX's compiler, or the peak of torch's allocator.
``first_call_s`` is tracing, compilation and one run, less if kernels were compiled before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from peers.ops import Call, Implementation, Task
from runner import check_torch_device
from timing import jax_ms, timed, torch_ms

from recurrences.inputs import converted, draw, split

DECODE_STEPS = 32
Function = Callable[..., Any]


class Jax:
    """JAX's side. Calls are compiled ahead of time, so that their memory is known."""

    def __init__(self):
        import jax

        self.jax, self.device = jax, jax.devices()[0].device_kind

    def arrays(self, implementation: Implementation, task: Task) -> Any:
        jax, jnp = self.jax, self.jax.numpy
        keys = iter(jax.random.split(jax.random.key(0), 16))
        convert = jax.lax.convert_element_type
        cast = jax.jit(lambda x: converted(implementation, x, jnp, task.dtype, convert))
        normal, uniform = jax.random.normal, jax.random.uniform
        drawn = draw(task, jnp, lambda *s: normal(next(keys), s), lambda *s: uniform(next(keys), s))
        return split(task, cast(drawn))

    def from_numpy(self, x: Any) -> Any:
        return self.jax.tree.map(self.jax.numpy.asarray, x)

    def to_numpy(self, x: Any) -> Any:
        return self.jax.tree.map(lambda a: np.asarray(a).astype(np.float64), x)

    def function(self, implementation: Implementation, task: Task, call: Call) -> Function:
        def backward(x, do, ds):
            (o, final), pull = self.jax.vjp(call, x)
            if not implementation.final_cotangent:
                ds = self.jax.numpy.zeros_like(ds)
            return (o, final), pull((do, None if final is None else ds))[0]

        return self.jax.jit(backward if task.backward else lambda x, do, ds: (call(x), {}))

    def compile(self, implementation: Implementation, task: Task, call: Call) -> None:
        """Adds a task's program to JAX's cache."""
        inputs = self.jax.eval_shape(lambda: self.arrays(implementation, task))
        self.function(implementation, task, call).lower(*inputs).compile()

    def measure(self, function: Function, inputs: Any) -> dict[str, Any]:
        began = time.perf_counter()
        compiled = function.lower(*inputs).compile()
        self.jax.block_until_ready(compiled(*inputs))
        first = time.perf_counter() - began
        ms, planned = jax_ms(compiled, *inputs), compiled.memory_analysis()
        peak = None if planned is None else (planned.temp_size_in_bytes + planned.output_size_in_bytes) / 1e9
        source = "compiler: temporaries and outputs"
        return {"ms": ms, "peak_gb": peak, "peak_from": source, "first_call_s": first}

    def decode(self, implementation: Implementation, task: Task, call: Call) -> dict[str, Any]:
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
    """torch's side, on one CUDA device."""

    def __init__(self):
        import torch

        check_torch_device()
        self.torch, self.device = torch, torch.cuda.get_device_name()

    def _cast(self, a: Any, dtype: str) -> Any:
        return a.to(getattr(self.torch, dtype)).contiguous()

    def arrays(self, implementation: Implementation, task: Task) -> Any:
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(0)
        of = lambda draws: lambda *shape: draws(shape, generator=generator, device="cuda")
        drawn = draw(task, torch, of(torch.randn), of(torch.rand))
        return split(task, converted(implementation, drawn, torch, task.dtype, self._cast))

    def from_numpy(self, x: Any) -> Any:
        arrays, do, ds = x
        to_gpu = lambda a: self._cast(self.torch.from_numpy(a.astype(np.float32)).cuda(), a.dtype.name)
        return {name: to_gpu(a) for name, a in arrays.items()}, to_gpu(do), to_gpu(ds)

    def to_numpy(self, x: Any) -> Any:
        (o, final), grads = x
        to_cpu = lambda a: a.detach().double().cpu().numpy()
        return (to_cpu(o), to_cpu(final)), {name: to_cpu(g) for name, g in grads.items()}

    def function(self, implementation: Implementation, task: Task, call: Call) -> Function:
        torch = self.torch

        def run(x, do, ds):
            if not task.backward:
                with torch.no_grad():
                    return call(x), {}
            leaves = {name: a.detach().requires_grad_() for name, a in x.items()}
            o, final = call(leaves)
            results, cotangents = ((o, final), (do, ds)) if implementation.final_cotangent else ((o,), (do,))
            grads = torch.autograd.grad(results, list(leaves.values()), cotangents)
            return (o, final), dict(zip(leaves, grads))

        return run

    def measure(self, function: Function, inputs: Any) -> dict[str, Any]:
        torch = self.torch
        began = time.perf_counter()
        function(*inputs)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*inputs)
        peak, source = (torch.cuda.max_memory_allocated() - before) / 1e9, "allocator: peak in a call"
        ms = torch_ms(function, *inputs)
        return {"ms": ms, "peak_gb": peak, "peak_from": source, "first_call_s": first}

    def decode(self, implementation: Implementation, task: Task, call: Call) -> dict[str, Any]:
        """A call with one token: torch has no loop on the device."""
        return self.measure(self.function(implementation, task, call), self.arrays(implementation, task))
