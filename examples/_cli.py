"""Programs: options, errors in one line, interrupts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import tyro

# the options behind those arguments of `fla_jax.training.RunFolder` with which its errors begin
FLAGS = {"folder": "--out", "data": "--data", "resume": "--resume", "facts": "--resume"}

Options = TypeVar("Options")
Main = Callable[[list[str] | None], None]


def program(lower: str) -> Callable[[Main], Main]:
    """Decorates a ``main``: an error that the user can mend ends it with one line and a status other than 0.

    ``lower`` names the options that cost memory. Other errors keep their traceback, and in dev mode all do.
    """

    def decorate(main: Main) -> Main:
        name = Path(main.__code__.co_filename).name

        @functools.wraps(main)
        def run(arguments: list[str] | None = None) -> None:
            if hasattr(sys.stdout, "reconfigure"):  # a terminal without a character shows "?" for it
                sys.stdout.reconfigure(errors="replace")
            for logger in (
                "absl",
                "asyncio",
            ):  # Orbax logs what it also raises, and goes on when the program ends
                logging.getLogger(logger).setLevel(logging.CRITICAL)
            sys.unraisablehook = lambda unraisable: None
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            try:
                main(arguments)
                sys.stdout.flush()
            except KeyboardInterrupt:
                print(f"\n{name}: interrupted", file=sys.stderr)
                sys.exit(128 + signal.SIGINT)
            except Exception as error:
                line = _line(error, lower)
                if jax.distributed.is_initialized():
                    _end_at_once(traceback.format_exc() if line is None else f"{name}: {line}")
                if line is None or sys.flags.dev_mode:
                    raise
                if "the output: " in line:  # Python would try to write the rest of the buffer again at exit
                    with contextlib.suppress(OSError):
                        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                if isinstance(error, BrokenPipeError):
                    sys.exit(1)  # the reader of the output is gone
                sys.exit(f"{name}: {line}")

        return run

    return decorate


def _end_at_once(text: str) -> NoReturn:
    """Ends a process of several at once: Python's exit would wait for the others, which wait for this one."""
    with contextlib.suppress(OSError):  # the reader of the output may be gone
        sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _line(error: Exception, lower: str) -> str | None:
    """The line for the user; None for an error that no user can mend."""
    no_memory = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if no_memory or isinstance(error, MemoryError):
        return f"out of memory ({reason(error)}): lower {lower}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'the output'}: {reason(error)}"  # errors about files name the file
    if not isinstance(error, ValueError | TypeError | ImportError | OSError):
        return None
    argument, colon, problem = (line := reason(error)).partition(": ")
    if argument == "facts":
        named = lambda found: "the text (--data)" if found[0] == "text" else flag(found[0])
        problem = re.sub(r"\b\w+(?= was )", named, problem)
    return FLAGS[argument] + colon + problem if argument in FLAGS else line


def reason(error: Exception) -> str:
    """The reason of an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def parse(kind: type[Options], arguments: list[str] | None, description: str | None) -> Options:
    """The options of a dataclass, ``~`` in paths expanded; refuses text that is not UTF-8."""
    options: Any = tyro.cli(kind, args=arguments, description=description)
    paths = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (wrong := re.search("[\ud800-\udfff]", text)):
                raise ValueError(
                    f"{flag(field.name)} is not UTF-8: its character {wrong.start() + 1} is a lone byte"
                )
        if isinstance(value, Path):
            paths[field.name] = Path(os.path.expanduser(value))
    return dataclasses.replace(options, **paths)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_numbers(options: Any, *may_be_0: str, seed_bits: int = 63) -> None:
    """Refuses numbers that are not above 0, but for those named, or too large for any size."""
    for field in dataclasses.fields(options):
        name, value = field.name, getattr(options, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or name.startswith("mesh_"):
            continue
        is_allowed_0 = value == 0 and (name == "seed" or name in may_be_0)
        if not (0 < value < float("inf") or is_allowed_0):
            least = "not negative" if name == "seed" or name in may_be_0 else "above 0"
            raise ValueError(f"{flag(name)} must be a finite number {least}, got {value}")
        if isinstance(value, int) and value >= 2 ** (bits := seed_bits if name == "seed" else 31):
            raise ValueError(f"{flag(name)} must be below 2**{bits}, got {value}")


def first_device() -> jax.Device:
    """The device that JAX finds."""
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is a backend at all
        chosen, why = os.environ.get("JAX_PLATFORMS", ""), f": {reason(error)}" if str(error) else ""
        raise ValueError(f"JAX finds no device, with JAX_PLATFORMS={chosen!r}{why}") from error


def on_gpu() -> bool:
    return first_device().platform in ("gpu", "cuda")


def compute_dtype(precision: str) -> str:
    """The dtype that ``--precision`` names; ``auto``: bfloat16 on GPUs."""
    if precision == "auto":
        precision = "bf16" if on_gpu() else "fp32"
    return {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}[precision]


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM: the first one is noted, the second ends the program at once."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def about(what: str | Path, to_be: str) -> Iterator[None]:
    """Makes errors of the system name what failed: Python names no file when a write fails."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what} cannot be {to_be}: {reason(error)}") from error
