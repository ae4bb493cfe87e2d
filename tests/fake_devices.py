"""Programs on eight fake CPU devices.

Their number is fixed when JAX starts, so these programs have a process of their own. One serves all tests of
a pytest process: JAX and Flax are imported once.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import garbage
import interpreter

TESTS = Path(__file__).parent


def report(program: str, *args: Any) -> Any:
    """What the function ``report`` of a file, ``program`` by its path in tests/, returns for ``args``."""
    return _process().submit(_report, program, *args).result(timeout=500)


@functools.cache
def _process() -> concurrent.futures.Executor:
    environment = {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "TRITON_INTERPRET": "1",
    }
    spawn = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(1, spawn, _start, (environment,))
    atexit.register(executor.shutdown)
    return executor


def _start(environment: dict[str, str]) -> None:
    os.environ.update(environment)  # before anything imports JAX
    interpreter.patch_once()


def _report(program: str, *args: Any) -> Any:
    return _load(program).report(*args)


@functools.cache
def _load(program: str) -> Any:
    name = program.removesuffix(".py").replace("/", "_")  # two folders have a file of one name
    spec = importlib.util.spec_from_file_location(name, TESTS / program)
    assert spec is not None and spec.loader is not None, program
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    garbage.collect_seldom()
    return module
