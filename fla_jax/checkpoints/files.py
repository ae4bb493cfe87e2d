"""Files that are safe to open, and files that are complete when they appear."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .tensors import printable, quoted

if sys.platform != "win32":
    import fcntl

HUB_PREFIX = "hf://"  # of names of repositories (`fla_jax.checkpoints.hub`)
Json = Any  # a value of a JSON document
_MAX_JSON = 10**8  # bytes, also the limit of safetensors for its headers
_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def as_path(path: object) -> Path:
    """The argument ``path``, a local one.

    Raises:
        TypeError: it is no path. ValueError: it names a repository.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path must be a str or an os.PathLike of str, got {type(path).__name__}")
    if os.fspath(path).startswith(HUB_PREFIX):
        raise ValueError(f"path must be local, {HUB_PREFIX} is for loading models, got {path}")
    return Path(path)


def check_regular(path: Path) -> None:
    """Raises unless ``path`` is a file or a link to one: a FIFO waits for a writer, a device may have no end.

    Raises:
        ValueError: it is something else. OSError: it does not exist, or cannot be looked at.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "something else")
        raise ValueError(f"{path} must be a regular file, got {kind}")


def unique_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object; Python takes the last of several values of one name, other readers another one."""
    values: dict[str, Json] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it holds {quoted(name)} twice")
        values[name] = value
    return values


def load_json(path: Path) -> dict[str, Json]:
    """The JSON object in a file.

    Raises:
        ValueError: it is no regular file, too large, or holds something else. OSError: it cannot be opened.
    """
    check_regular(path)
    if path.stat().st_size > _MAX_JSON:
        raise ValueError(f"{path} has more than {_MAX_JSON} bytes, too many for a description of a model")
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {printable(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Json]) -> None:
    """Writes a JSON object to a file, which appears or is replaced when it is complete."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` when the block ends, and is removed when the block raises.

    Its name is ``NAME.PID-N.tmp`` in the same directory: several threads and processes may save to one path,
    the last one to end wins, and readers see complete files. It is locked while it is written; unlocked files
    of killed processes are removed.

    Raises:
        OSError: it cannot be written; the error names ``path``.
    """
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        _remove_leftovers(path)
        file = _create(path)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the data do
            if sys.platform == "win32":  # which renames no open file
                file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk shows again when the rest of a buffer is written
                file.close()
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
        file.close()
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _create(path: Path) -> BinaryIO:
    """A new file in the directory of ``path``, locked, with the permissions of the umask."""
    for n in itertools.count():
        try:
            name = path.with_name(f"{path.name}.{os.getpid()}-{n}.tmp")
            file = open(name, "xb")  # noqa: SIM115, the caller closes it
        except FileExistsError:
            continue
        _lock(file, wait=True)
        if _is_at(file, file.name):  # or another save took it for something left behind, before it was locked
            return file
        file.close()
    raise AssertionError("unreachable")


def _remove_leftovers(path: Path) -> None:
    """Removes temporary files of killed saves to ``path``; a file that cannot be locked is of a live one."""
    pattern = re.compile(re.escape(path.name) + r"\.\d+(-\d+)?\.tmp")
    with os.scandir(path.parent) as entries:
        found = [entry for entry in entries if pattern.fullmatch(entry.name)]
        names = [entry.path for entry in found if entry.is_file(follow_symlinks=False)]
    for name in names:
        with contextlib.suppress(OSError), open(name, "rb") as file:
            # between opening and locking, its save may have ended, and another one have begun with this name
            if _lock(file, wait=False) and _is_at(file, name):
                os.unlink(name)


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    """Takes a file's lock, which ends with the process at the latest.

    False if another process or thread has it, or if the file system has no locks.
    """
    if sys.platform == "win32":  # which removes no open file: that is lock enough
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_at(file: BinaryIO, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name, follow_symlinks=False))
    except OSError:
        return False
