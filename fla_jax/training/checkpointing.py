"""Checkpoints of a training run: its state and position in the data, written by Orbax in the background."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..checkpoints.native import mismatch, orbax, reason
from ..core.arguments import check_integer

Result = TypeVar("Result")


class TrainingCheckpoints:
    """The checkpoints in the folder of a run. A context manager; in a run of several processes all of them
    make one, and call its methods alike.

    A checkpoint has the training state (parameters, optimiser, step), sharded as it is, and a JSON object,
    such as the state of a `fla_jax.data.batches` iterator. It appears in the folder when it is complete. The
    end of the ``with`` block waits for it; after an error, only in a run of one process, since others may
    have ended.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from fla_jax.training import TrainingCheckpoints
        >>> state = {"weight": jnp.arange(3.0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TrainingCheckpoints(folder) as checkpoints:
        ...         checkpoints.save(10, state, {"next_index": 10})
        ...         restored, data = checkpoints.restore(state)
        >>> restored["weight"].tolist(), data
        ([0.0, 1.0, 2.0], {'next_index': 10})
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, read_only: bool = False):
        """Opens the folder, and makes it if needed; removes incomplete checkpoints of a killed run.

        Args:
            folder: for checkpoints alone, shared by all hosts.
            keep: number of checkpoints, at least 1; older ones are deleted.
            read_only: changes nothing, and `save` is an error: for the folder of a run that may still be
                training.

        Raises:
            ImportError: orbax-checkpoint is not installed.
            ValueError: the folder cannot be opened, or ``keep`` is not a positive integer.
        """
        ocp, keep = orbax(), check_integer("keep", keep, 1)
        self.folder, self._args, self._step = Path(folder), ocp.args, 0
        self._read_only = read_only
        handlers = {"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
        try:
            self._manager = ocp.CheckpointManager(
                self.folder.absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=None if read_only else keep,
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                    create=not read_only,
                ),
                item_handlers=handlers,
            )
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be opened: {reason(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        elif jax.process_count() == 1:
            with contextlib.suppress(ValueError):  # the first error counts
                self.close()

    def save(self, step: int, state: PyTree, data: Mapping[str, PyTree] | None = None) -> None:
        """Starts to write a checkpoint, and returns once ``state`` may be donated. Waits for the one before.

        Args:
            step: its number, at least 0 and above that of the last checkpoint.
            state: a pytree of arrays.
            data: a JSON object; None for an empty one.

        Raises:
            ValueError: the folder was opened with ``read_only=True``; ``step`` is not an integer above that
                of the last checkpoint; or this checkpoint, or the one before, cannot be written, and the
                message names the last one that is complete.
        """
        if self._read_only:  # Orbax would write nothing
            raise ValueError(f"read_only must be False to save, got True for {self.folder}")
        step = check_integer("step", step, 0)
        self.wait()
        last = self._manager.latest_step()
        if last is not None and step <= last:  # Orbax would write nothing
            raise ValueError(f"step must be above {last}, the last checkpoint in {self.folder}, got {step}")
        self._step = step
        items = {
            "state": self._args.StandardSave(_as_arrays(state)),
            "data": self._args.JsonSave(dict(data or {})),
        }
        self._written(lambda: self._manager.save(step, args=self._args.Composite(**items)))

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            ValueError: see `save`.
        """
        self._written(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits, and closes the folder."""
        self.wait()
        self._manager.close()

    def restore(self, state: PyTree = None) -> tuple[PyTree, dict[str, PyTree]]:
        """The last complete checkpoint.

        Args:
            state: arrays or `jax.ShapeDtypeStruct` with the shapes, dtypes and shardings to restore, such as
                `TrainStep.abstract_state`'s; any mesh will do. None: the arrays as they were saved, on one
                device.

        Returns:
            ``(state, data)``.

        Raises:
            ValueError: there is no checkpoint, it cannot be read, or its arrays have other names, shapes or
                dtypes than ``state``; the message names the first.
        """
        self.wait()
        if self._read_only:  # the run may have written and deleted some since Orbax listed them
            self._manager.reload()
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"{self.folder} contains no checkpoint yet")
        state = _as_arrays(state)
        path, device = self.folder / str(step), jax.sharding.SingleDeviceSharding(jax.devices()[0])
        items = {
            "state": self._args.StandardRestore(state, fallback_sharding=device),
            "data": self._args.JsonRestore(),
        }
        try:
            saved = self._manager.item_metadata(step)["state"].tree
            difference = None if state is None else _difference(saved, state)
            if difference is None:
                found = self._manager.restore(step, args=self._args.Composite(**items))
                return found["state"], found["data"]
        except Exception as error:  # Orbax and TensorStore raise many kinds
            hint = "delete it to use the one before, if there is one"
            raise ValueError(f"{path} cannot be read: {reason(error)}; {hint}") from error
        raise ValueError(f"{path}: {difference}")

    def _written(self, write: Callable[[], Result]) -> Result:
        try:
            return write()
        except Exception as error:  # Orbax and TensorStore raise many kinds
            last = last_checkpoint(self.folder)
            good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
            path = self.folder / str(self._step)
            raise ValueError(f"{path} cannot be written: {reason(error)}; {good}") from error


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The path of the last complete checkpoint in a folder of `TrainingCheckpoints`, or None.

    Example:
        >>> from fla_jax.training import last_checkpoint
        >>> last_checkpoint("nowhere") is None
        True
    """
    steps = [int(path.name) for path in Path(folder).glob("*") if path.name.isdigit()]
    return Path(folder) / str(max(steps)) if steps else None


def _as_arrays(state: PyTree) -> PyTree:
    """``state`` with an array for each Python number, such as the first step of Flax's TrainState."""
    arrays = jax.ShapeDtypeStruct | jax.Array | np.ndarray
    return jax.tree.map(lambda x: x if isinstance(x, arrays) else jnp.asarray(x), state)


def _difference(saved: PyTree, wanted: PyTree) -> str | None:
    """A message about the first array of another name, shape or dtype than wanted; None if there is none."""
    found, arrays = _arrays(saved), _arrays(wanted)
    shapes = ({name: list(x.shape) for name, x in of.items()} for of in (found, arrays))
    if text := mismatch(*shapes):
        return text
    for name, x in arrays.items():
        if found[name].dtype != x.dtype:  # Orbax would cast it, and the resumed run differ from the first
            return f"{name} must have dtype {x.dtype}, got {found[name].dtype}"
    return None


def _arrays(tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Every array, or its shape and dtype, by its name, parameters first."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # saved as its numbers
            arrays[name] = jax.eval_shape(jax.random.key_data, x)
    return dict(sorted(arrays.items(), key=lambda item: not item[0].startswith("params/")))
