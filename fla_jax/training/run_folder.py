"""The folder of a training run: options.json and checkpoints/, locked, begun anew or resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Self

import jax
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from ..checkpoints.files import replacing
from .checkpointing import TrainingCheckpoints, last_checkpoint
from .folder_lock import check_folder, lock_folder

_FACTS = "options.json"


class RunFolder:
    """The folder of one training run, which no other process writes. A context manager; in a run of several
    processes all of them make one, and call its methods alike.

    The run's facts, whatever must stay the same when it is resumed, are in options.json; checkpoints are in
    checkpoints/, and the program may add files.

    Attributes:
        path: of the folder.
        moved: the new path of an earlier run, or None.
        changes: ``{name: (then, now)}``: facts that were allowed to change when the run was resumed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from fla_jax.training import RunFolder
        >>> def train(folder, steps, resume=False):
        ...     init = lambda: {"step": jnp.zeros((), int)}
        ...     with RunFolder(folder, resume=resume) as run:
        ...         facts = {"seed": 0, "steps": steps}
        ...         checkpoints, state, _ = run.start(facts, init, init, may_change={"steps"})
        ...         while state["step"] < steps:
        ...             state = {"step": state["step"] + 1}
        ...         run.check()
        ...         checkpoints.save(steps, state)
        ...         checkpoints.close()
        ...         return run
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     run = train(parent + "/run", 10)
        ...     run = train(parent + "/run", 20, resume=True)
        ...     again = train(parent + "/run", 10)
        >>> run.changes, again.moved.name
        ({'steps': (10, 20)}, 'run-1')
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        data: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> None:
        """Refuses a folder in which a run would lose or mix up files; changes nothing.

        Args:
            folder: of this run alone. A new run renames an earlier one there, with a number behind its name.
            data: the file or the folder that is learned; it must be elsewhere.
            resume: whether the run in the folder goes on.

        Raises:
            ValueError: the folder cannot be used; the message begins with the argument that is wrong.
        """
        self.path, self._resume = Path(folder), resume
        self.moved: Path | None = None
        self.changes: dict[str, tuple[PyTree, PyTree]] = {}
        self._check: Callable[[], None] = lambda: None
        self._stack = contextlib.ExitStack()
        self._real = Path(os.path.realpath(folder))  # a symbolic link stays: the new run is on the same disk
        check_folder(folder)
        try:
            str(self._real).encode()
        except UnicodeEncodeError:
            raise ValueError(f"folder: {folder} is not UTF-8, and checkpoints cannot be written") from None
        learned = None if data is None else Path(os.path.realpath(data))
        if learned and learned.is_dir() and self._real.is_relative_to(learned):
            raise ValueError(f"folder: {folder} is inside the data, {data}: the run's files would be learned")
        has_run = (self._real / _FACTS).exists()
        if resume and not has_run:
            raise ValueError(f"resume: there is no run in {folder}; begin one first")
        if resume:
            return
        if Path.cwd().is_relative_to(self._real):
            raise ValueError(f"folder: {folder} is the current folder or one above it; name one for this run")
        if learned and learned.is_relative_to(self._real):
            raise ValueError(f"data: {data} is inside {folder}, which a new run moves aside")
        if not has_run and self._real.is_dir() and any(self._real.iterdir()):
            raise ValueError(f"folder: {folder} contains other files than a run's; name one for this run")

    def __enter__(self) -> Self:
        """Locks the folder, with a file beside it: the folder may be moved, or not exist yet.

        Raises:
            ImportError, ValueError, OSError: see `lock_folder`.
        """
        # `process_index` would look for devices, which a single process may not have chosen yet
        if not jax.distributed.is_initialized() or jax.process_index() == 0:
            lock = self._real.with_name(f".{self._real.name}.lock")
            self._check = self._stack.enter_context(lock_folder(self.path, lock))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Call this before writing.

        Raises:
            ValueError: another process uses the folder, because the lock file was deleted, or it is gone.
        """
        self._check()

    def start(
        self,
        facts: Mapping[str, PyTree],
        init: Callable[[], PyTree],
        abstract: Callable[[], PyTree],
        *,
        may_change: Collection[str] = (),
        keep: int = 3,
    ) -> tuple[TrainingCheckpoints, PyTree, dict[str, PyTree]]:
        """Begins the run, or resumes it from its last checkpoint.

        Args:
            facts: a JSON object: whatever must stay the same when the run is resumed. Names that the run was
                not begun with are new facts, and not compared. Tuples are stored and compared as lists.
            init: makes the state of a new run.
            abstract: gives the shapes, dtypes and shardings of a state to restore, such as
                `TrainStep.abstract_state`.
            may_change: names of facts that need not stay the same; differences are in ``changes``.
            keep: number of checkpoints; older ones are deleted.

        Returns:
            The checkpoints, the state, and the JSON object that was saved with it, ``{}`` for a new run.

        Raises:
            ValueError: a fact is no JSON value, facts differ, there is no checkpoint, or it cannot be read. A
                run that cannot begin moves no earlier one.
            OSError: the folder cannot be made or renamed; the error names it.
        """
        facts, checkpoints = _json_facts(facts), self.path / "checkpoints"
        if not self._resume:
            state = init()
            if jax.process_index() == 0:  # last: a state that cannot be made moves nothing
                self._begin(facts)
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("fla_jax: the folder of a run")
            return TrainingCheckpoints(checkpoints, keep=keep), state, {}
        then = run_description(self.path)
        changes = {name: (x, facts.get(name)) for name, x in then.items() if facts.get(name) != x}
        refused = [
            f"{name} was {before} in {self.path} and is {now} now"
            for name, (before, now) in changes.items()
            if name not in may_change
        ]
        if refused:
            raise ValueError(
                f"facts: {', '.join(refused)}; resume with the same, or begin another run elsewhere"
            )
        if last_checkpoint(checkpoints) is None:
            raise ValueError(f"resume: there is no checkpoint in {self.path} yet")
        opened = TrainingCheckpoints(checkpoints, keep=keep)
        state, data = opened.restore(abstract())
        self.changes = changes
        if jax.process_index() == 0:
            self._describe(facts)
        return opened, state, data

    def _begin(self, facts: Mapping[str, PyTree]) -> None:
        real = self._real
        if (real / _FACTS).exists():
            names = (real.with_name(f"{real.name}-{i}") for i in itertools.count(1))
            free = next(name for name in names if not os.path.lexists(name))
            self.moved = real.rename(free)
        real.mkdir(parents=True, exist_ok=True)
        self._describe(facts)

    def _describe(self, facts: Mapping[str, PyTree]) -> None:
        with replacing(self._real / _FACTS) as file:
            file.write((json.dumps(facts, indent=2) + "\n").encode())


def _json_facts(facts: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Facts as options.json returns them, which has lists for tuples."""
    found: dict[str, PyTree] = {}
    for name, value in facts.items():
        try:
            found |= json.loads(json.dumps({name: value}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"facts: {name} must be a JSON value: {error}") from None
    return found


def run_description(folder: str | os.PathLike[str]) -> dict[str, PyTree]:
    """The facts of the run in a folder.

    Raises:
        ValueError: options.json is missing, or is not a JSON object.

    Example:
        >>> from fla_jax.training import run_description
        >>> run_description("nowhere")
        Traceback (most recent call last):
        ValueError: nowhere/options.json cannot be read: No such file or directory
    """
    path = Path(folder, _FACTS)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must contain a JSON object, got a {type(found).__name__}")
    return found
