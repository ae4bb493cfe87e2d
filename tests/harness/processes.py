"""Processes whose environment is set before JAX starts: eight fake CPU devices, or compilers for GPUs.

One of each serves all tests of a pytest process: JAX and Flax are imported once.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import garbage, interpreter

TESTS = Path(__file__).parents[1]


def report(program: str, *args: Any) -> Any:
    """What ``report(*args)`` of a file, ``program`` by its path in tests/, returns on eight fake devices."""
    return devices().submit(_report, program, *args).result(timeout=500)


def on_devices(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` of an importable module on eight fake devices."""
    return devices().submit(function, *args).result(timeout=500)


@functools.cache
def devices() -> concurrent.futures.Executor:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    return executor(1, {"XLA_FLAGS": flags, "TRITON_INTERPRET": "1"})


@functools.cache
def compilers(**environment: str) -> concurrent.futures.Executor:
    """Two processes without Triton's interpreter."""
    return executor(2, {"TRITON_INTERPRET": "0"} | environment)


def executor(workers: int, environment: dict[str, str]) -> concurrent.futures.Executor:
    spawn = multiprocessing.get_context("spawn")
    environment = {"JAX_PLATFORMS": "cpu"} | environment
    made = concurrent.futures.ProcessPoolExecutor(workers, spawn, _start, (environment,))
    atexit.register(made.shutdown, cancel_futures=True)
    return made


def _start(environment: dict[str, str]) -> None:
    os.environ.update(environment)  # before anything imports JAX
    interpreter.patch()


def _report(program: str, *args: Any) -> Any:
    return load(program).report(*args)


@functools.cache
def load(program: str) -> Any:
    """The module of a file by its path in tests/."""
    name = program.removesuffix(".py").replace("/", "_")  # two folders have a file of one name
    spec = importlib.util.spec_from_file_location(name, TESTS / program)
    assert spec is not None and spec.loader is not None, program
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    garbage.collect_seldom()
    return module
