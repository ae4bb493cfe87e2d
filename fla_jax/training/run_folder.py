"""The folder of a training run: its description in options.json, and earlier runs that are moved aside."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from jaxtyping import PyTree

from ..checkpoints.files import replacing

NAME = "options.json"


def start_run(folder: str | os.PathLike[str], description: Mapping[str, PyTree]) -> Path | None:
    """Makes the folder of a new run, with its description in options.json. One process of a run does this.

    Args:
        folder: of this run alone. An earlier run there is renamed, with a number behind its name.
        description: a JSON object: whatever stays the same when the run is resumed.

    Returns:
        The new path of the earlier run, or None.

    Raises:
        OSError: the folder cannot be made, or not be renamed.

    Example:
        >>> import pathlib, tempfile
        >>> from fla_jax.training import start_run
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = pathlib.Path(parent, "run")
        ...     first = start_run(folder, {"seed": 0})
        ...     second = start_run(folder, {"seed": 1})
        >>> first is None, second.name
        (True, 'run-1')
    """
    real = Path(os.path.realpath(folder))  # a symbolic link stays: the new run is on the same disk
    aside: Path | None = None
    if (real / NAME).exists():
        names = (real.with_name(f"{real.name}-{i}") for i in itertools.count(1))
        aside = real.rename(next(name for name in names if not os.path.lexists(name)))
    real.mkdir(parents=True, exist_ok=True)
    describe_run(real, description)
    return aside


def describe_run(folder: str | os.PathLike[str], description: Mapping[str, PyTree]) -> None:
    """Writes options.json, whole or not at all.

    Example:
        >>> import tempfile
        >>> from fla_jax.training import describe_run, run_description
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     describe_run(folder, {"seed": 0})
        ...     run_description(folder)
        {'seed': 0}
    """
    with replacing(Path(folder, NAME)) as file:
        file.write((json.dumps(dict(description), indent=2) + "\n").encode())


def run_description(folder: str | os.PathLike[str]) -> dict[str, PyTree]:
    """The description of the run in a folder.

    Raises:
        ValueError: options.json is missing, or is not a JSON object.

    Example:
        >>> from fla_jax.training import run_description
        >>> run_description("nowhere")
        Traceback (most recent call last):
        ValueError: nowhere/options.json cannot be read: No such file or directory
    """
    path = Path(folder, NAME)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must contain a JSON object, got a {type(found).__name__}")
    return found


def run_changes(
    folder: str | os.PathLike[str], description: Mapping[str, PyTree]
) -> dict[str, tuple[PyTree, PyTree]]:
    """The differences between the run in a folder and a description with which it is resumed.

    Returns:
        ``{name: (then, now)}``, for the names that the run was started with.

    Raises:
        ValueError: see `run_description`.

    Example:
        >>> import tempfile
        >>> from fla_jax.training import describe_run, run_changes
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     describe_run(folder, {"seed": 0, "steps": 100})
        ...     run_changes(folder, {"seed": 0, "steps": 200})
        {'steps': (100, 200)}
    """
    then = run_description(folder)
    return {name: (x, description.get(name)) for name, x in then.items() if description.get(name) != x}
