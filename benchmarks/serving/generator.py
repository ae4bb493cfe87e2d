"""The parts of `serve.py` in the process of a `Generator`: its rate, new parameters, rules of sampling."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from typing import Any

import records
from decode_model import make
from records import Record

from serving.load import COMPILED, ROUNDS, Load, Timed, rates, warm_up


class Compilations(logging.Handler):
    """Counts programs that are compiled, or read from the compilation cache."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count = 0
        logging.getLogger("jax").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += COMPILED in record.getMessage()


def generator(settings: dict[str, Any]) -> Any:
    """The job of each part, all with one model."""
    import jax

    from fla_jax.generation import Generator, load_tokenizer

    compilations, load = Compilations(), Load(**settings["load"])
    # the rest is for features, and for requests in flight
    until = time.monotonic() + 0.8 * settings["timeout"]
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    # layers in a loop: a program that reads prompts compiles in the time of one layer, in the server too
    model, params = make(7, settings["model"], settings["vocab"], dtype, scan=True)
    made: list[Generator] = []

    def run(job: dict[str, Any]) -> Record:
        if job["part"] == "save":
            return save(settings, model, params, dtype)
        if job["part"] == "features":
            return features(model, params, settings["slots"], 32 if settings["quick"] else 256)
        if not made:
            tokenizer = load_tokenizer(settings["tokenizer"])
            made.append(Generator(model, params, slots=settings["slots"], tokenizer=tokenizer))
        if job["part"] == "update_params":
            return update(made[0], params, compilations)
        began = time.monotonic()
        warm_up(
            load, lambda prompts, new: made[0].generate(prompts, max_tokens=new), settings["compile_seconds"]
        )
        warm = time.monotonic() - began
        run_load(made[0], load.short(), until)
        gc.collect()
        gc.freeze()  # as the server does once it has compiled
        for _ in range(ROUNDS):
            before = compilations.count
            found = rates(load, [run_load(made[0], load, until)])
            found |= {"compiled": compilations.count - before, "compile_s": warm}
            if not found["compiled"] or time.monotonic() + 2 * found["took_s"] > until:
                break
        return {"ms": load.clients / found["full_per_s"] * 1e3, **found}

    return run


def save(settings: dict[str, Any], model: Any, params: Any, dtype: str) -> Record:
    """Saves the checkpoint that is served; returns what all records have."""
    import jax

    from fla_jax.checkpoints import save_checkpoint

    save_checkpoint(settings["folder"], model, params, tokenizer=settings["tokenizer"])
    versions = records.versions(("jax", "jaxlib", "triton", "flax", "starlette", "uvicorn", "pydantic"))
    return {
        "device": jax.devices()[0].device_kind,
        "weights": dtype,
        "state": "float32",
        "versions": versions,
    }


def run_load(generator: Any, load: Load, until: float) -> list[Timed]:
    """As many requests in flight as there are clients, all answered; none begins after ``until``."""
    from fla_jax.generation import SamplingParams

    requests, began, first, done = load.requests()[::-1], {}, {}, list[Timed]()
    start, clients = time.monotonic(), 0
    while requests or began:
        now = time.monotonic()
        requests = requests if now < until else []
        if clients < load.clients:
            clients = min(load.clients, 1 + int((now - start) / load.ramp * load.clients))
        while requests and len(began) < clients:
            prompt, new = requests.pop()
            rules = SamplingParams.policy(max_tokens=new, ignore_eos=True)
            began[generator.submit(prompt, rules)] = time.monotonic()
        for event in generator.step():
            request, now = event.request, time.monotonic()
            first.setdefault(request, now)
            if event.completion is not None:
                if event.completion.error is not None:
                    raise event.completion.error
                done.append(Timed(began.pop(request), first[request], now, len(event.completion.tokens)))
    return done


def update(generator: Any, params: Any, compilations: Compilations) -> Record:
    """Seconds until other parameters are ready, and the programs compiled by that and by the next tokens."""
    import jax
    import numpy as np

    times, compiled = [], []
    run = lambda: generator.generate([[1, 2, 3]] * 4, max_tokens=9)
    times_of = jax.jit(lambda tree, factor: jax.tree.map(lambda x: x * factor.astype(x.dtype), tree))
    run()
    for factor in (1.1, 1.2, 1.3):
        new = jax.block_until_ready(times_of(params, np.float32(factor)))
        before, began = compilations.count, time.perf_counter()
        generator.update_params(new)
        generator.step()  # nothing is in flight: the engine takes them
        jax.block_until_ready(generator.engine.decoder.weights)
        times.append(time.perf_counter() - began)
        run()
        compiled.append(compilations.count - before)
    return {
        "ms": statistics.median(times) * 1e3,
        "ms_all": [t * 1e3 for t in times],
        "compiled": sum(compiled),
    }


def features(model: Any, params: Any, slots: int, tokens: int) -> Record:
    """Milliseconds of a token of all rows with the default rules of sampling, with those that most requests
    ask for, and with every rule and the most probable tokens.
    """
    import jax
    import numpy as np

    from fla_jax.generation import Decoder, SamplingParams, prefill, sampling_arrays
    from fla_jax.generation.decode_loop import PLAIN, RANKED, STEPS_PER_CALL, begin, decode, row_keys
    from fla_jax.generation.prompts import put_like

    decoder, vocab = Decoder(model, params), model.config.vocab_size
    usual = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    every = usual | {"logprobs": 5, "logit_bias": {i: -1.0 for i in range(20, 60)}, "banned": range(8)}
    # stop tokens are banned: they are looked for, and never come
    every |= {"uncounted": range(60, 80), "stop_tokens": range(4)}
    programs = {"default": ({}, PLAIN), "usual": (usual, PLAIN), "every": (every, RANKED)}
    fixed = decoder.step.per_call
    count, found = fixed or STEPS_PER_CALL, {}
    for name, (rule, scores) in programs.items():
        logits, state = prefill(model, params, [[1 + i % 7, 2, 3] for i in range(slots)])
        carry = begin(params, logits, decoder.state(state), row_keys(range(slots)), 2**30)
        rules = put_like(params, sampling_arrays([SamplingParams(**rule)] * slots, vocab))
        times = []
        for _ in range(6):
            began = time.perf_counter()
            for _ in range(max(2, tokens // count)):
                carry, out = decode(
                    decoder.step, decoder.weights, rules, carry, np.int32(count), fixed, scores
                )
            jax.block_until_ready(out)
            times.append((time.perf_counter() - began) / (max(2, tokens // count) * count) * 1e3)
        assert (np.asarray(out.tokens) >= 0).all(), "a row without tokens"
        found[name] = statistics.median(times[1:])  # the first one compiles
    return {
        "ms": found["every"],
        "ms_default": found["default"],
        "cost": found["every"] / found["default"] - 1,
        "cost_usual": found["usual"] / found["default"] - 1,
    }
