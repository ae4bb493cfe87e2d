"""A folder that one process writes at a time."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def lock_folder(
    folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Iterator[Callable[[], None]]:
    """Locks a folder for this process while the block runs, and makes it if needed.

    The lock file names the process. The system frees the lock when the process ends, so a file that is left
    over locks nothing.

    Args:
        folder: the folder.
        path: of the lock file; None for ``.lock`` in the folder. With another path the folder is not made.

    Yields:
        A function to call before writing. It raises ValueError if another process uses the folder, because
        the lock file was deleted, or if the folder is gone.

    Raises:
        ImportError: filelock is not installed.
        ValueError: ``folder`` is a file, or not writable, or in use by another process.
        OSError: a folder cannot be made, or the lock file not be written; the error names it.

    Example:
        >>> import tempfile
        >>> from fla_jax.training import lock_folder
        >>> with tempfile.TemporaryDirectory() as folder, lock_folder(folder) as check:
        ...     check()
    """
    try:
        import filelock
    except ImportError as error:
        raise ImportError("lock_folder needs filelock: pip install filelock") from error
    folder = Path(folder)
    path = folder / ".lock" if path is None else Path(path)
    mine = f"{os.getpid()} on {platform.node()}"

    def holder() -> str | None:
        with contextlib.suppress(OSError):  # Windows lets nobody read a locked file
            return path.read_text(errors="replace").partition("\n")[0] or None
        return None

    def check() -> None:
        if holder() not in (mine, None):  # the lock was deleted, perhaps with everything around it
            holds = f"in use by process {holder()}, which found no lock there"
            raise ValueError(f"folder: {folder} is now {holds}")
        if not folder.exists():  # Orbax would make the folder again, and leave half a run
            raise ValueError(f"folder: {folder} is gone, deleted or moved while the program ran")

    check_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"folder: {folder} is in use by process {holder() or '(unknown)'}") from None
    with contextlib.suppress(OSError):
        path.write_text(mine + "\n")
    try:
        yield check
    finally:
        if holder() == mine:
            path.unlink(missing_ok=True)
        lock.release()


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuses a file, and a folder that is not writable; there may be none."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ValueError(f"folder: {folder} is a file, not a folder")
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise ValueError(f"folder: {folder} is not writable")
