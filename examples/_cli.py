"""What the examples share as programs: options, errors in one line, interrupts, files and folders."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import filelock
import jax
import tyro

Options = TypeVar("Options")
Main = Callable[[list[str] | None], None]


def program(lower: str) -> Callable[[Main], Main]:
    """Decorates a ``main``: what a user can cause and mend ends it with one line and a status other than 0.

    ``lower`` names the options that cost memory. Other errors keep their traceback, and in dev mode all do.
    """

    def decorate(main: Main) -> Main:
        name = Path(main.__code__.co_filename).name

        @functools.wraps(main)
        def run(arguments: list[str] | None = None) -> None:
            if hasattr(sys.stdout, "reconfigure"):  # a terminal without a character shows "?" for it
                sys.stdout.reconfigure(errors="replace")
            try:
                main(arguments)
                sys.stdout.flush()
            except KeyboardInterrupt:
                print(f"\n{name}: interrupted", file=sys.stderr)
                sys.exit(128 + signal.SIGINT)
            except Exception as error:
                line = _line(error, lower)
                if line is None or sys.flags.dev_mode:
                    raise
                if _is_output(error):
                    _give_up_output()
                if isinstance(error, BrokenPipeError):
                    sys.exit(1)  # whoever read the output wants no more of it: there is nothing to tell
                sys.exit(f"{name}: {line}")

        return run

    return decorate


def _line(error: Exception, lower: str) -> str | None:
    """What to tell the user of an error; None for one that no user can mend."""
    no_memory = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if no_memory or isinstance(error, MemoryError):
        return f"out of memory ({reason(error)}): lower {lower}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{'the output' if _is_output(error) else error.filename}: {reason(error)}"
    return reason(error) if isinstance(error, ValueError | TypeError | ImportError | OSError) else None


def _is_output(error: Exception) -> bool:
    """Whether the system could not write what was printed: its errors about files name the file."""
    return isinstance(error, OSError) and error.errno is not None and error.filename is None


def _give_up_output() -> None:
    """Throws away what is still buffered: Python would try to write it at exit, and complain again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def reason(error: Exception) -> str:
    """The reason of an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"(?:os_error_code='|OS error )(\d+)", str(error))
    if code:  # TensorStore's way to tell of a full disk
        return os.strerror(int(code[1]))
    lines = (line.partition(" [tensorstore_spec")[0].strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def parse(kind: type[Options], arguments: list[str] | None, description: str | None) -> Options:
    """The options of a dataclass, ``~`` in paths expanded; refuses text that is not UTF-8."""
    options: Any = tyro.cli(kind, args=arguments, description=description)
    paths = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (wrong := re.search("[\ud800-\udfff]", text)):
                flag = "--" + field.name.replace("_", "-")
                raise ValueError(f"{flag} is not UTF-8: its character {wrong.start() + 1} is a lone byte")
        if isinstance(value, Path):
            paths[field.name] = Path(os.path.expanduser(value))
    return dataclasses.replace(options, **paths)


def check_numbers(options: Any, *names: str) -> None:
    """Refuses numbers that are not above 0, or too large for any size, and seeds that JAX cannot take."""
    for name in names:
        if not 0 < (value := getattr(options, name)) < 2**31:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 and below 2**31, got {value}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {options.seed}")


def first_device() -> jax.Device:
    """The device that JAX finds."""
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is a backend at all
        chosen, why = os.environ.get("JAX_PLATFORMS", ""), f": {reason(error)}" if str(error) else ""
        raise ValueError(f"JAX finds no device, with JAX_PLATFORMS={chosen!r}{why}") from error


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """SIGINT and SIGTERM as they come: one is noted, no more; a second one ends the program at once."""
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
    """Makes the system's errors say what they are about: Python names no file when a write fails."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what} cannot be {to_be}: {reason(error)}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces ``path`` when it is complete; an error leaves the old file."""
    new = path.with_stem(path.stem + ".new")
    with about(path, "written"):
        try:
            yield new
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def make_folder(out: Path) -> None:
    """Makes the folder ``--out``, and refuses one that cannot be written to before work is lost."""
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out: {out} is a file, not a folder")
    with about(f"--out: {out}", "made"):
        out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out: {out} is not writable")


@contextlib.contextmanager
def claimed(out: Path, path: Path) -> Iterator[Callable[[], None]]:
    """Keeps other processes out of the folder ``--out``; gives a function that raises if another one got in.

    The lock file ``path`` tells others which process holds it. However that process ends, the system lets go
    of it: a file that is left over locks nothing.
    """
    mine = f"{os.getpid()} on {platform.node()}"

    def holder() -> str | None:
        with contextlib.suppress(OSError):  # Windows lets nobody read a locked file
            return next(iter(path.read_text(errors="replace").splitlines()), None)
        return None

    def check() -> None:
        if holder() not in (mine, None):  # somebody has deleted the lock, perhaps with all that is around it
            raise ValueError(f"--out: {out} is now in use by process {holder()}, which found no lock there")

    with about(f"--out: the folder {path.parent}", "made"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with about(f"--out: {path}", "locked"):
        lock = filelock.FileLock(path, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise ValueError(f"--out: {out} is in use by process {holder() or '(unknown)'}") from None
    try:
        # filelock's choice for disks without locks keeps such a record of its own
        if not isinstance(lock, filelock.SoftFileLock):
            with contextlib.suppress(OSError):
                path.write_text(mine + "\n")
        yield check
    finally:
        if holder() == mine:
            with contextlib.suppress(OSError):
                path.unlink()
        lock.release()
