"""The checkpoints of ``pretrain.py``: parameters, optimizer, step, data iterator, written while it trains."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from _cli import about, reason
from _run import reported_once


class Checkpoints:
    """Those in a run's folder. All processes of a run make one and call its methods alike."""

    def __init__(self, out: Path, keep: int):
        """Clears away half checkpoints that a killed run has left."""
        self.folder = out / "checkpoints"
        self._step: int | None = None  # that is being written
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
        with about(self.folder, "opened"):
            self._manager = ocp.CheckpointManager(
                self.folder.absolute(), options=options, item_handlers=handlers
            )

    def latest(self) -> int | None:
        """The step of the last one that is complete."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: dict[str, Any]) -> None:
        """Begins to write one; waits for the one before, and tells what went wrong with it."""
        self.finish()
        self._step = step
        items = {"state": ocp.args.StandardSave(state), "data": ocp.args.JsonSave(data)}
        self._guarded(lambda: self._manager.save(step, args=ocp.args.Composite(**items)))

    def finish(self) -> None:
        """Waits until everything is written."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self.finish()
        self._manager.close()

    def _guarded(self, write: Any) -> None:
        try:
            with reported_once():
                write()
        except Exception as error:  # Orbax and TensorStore raise what they like
            path, kept = self.folder / str(self._step), last_good(self.folder)
            raise ValueError(f"{path} cannot be written: {reason(error)}; {kept}") from error

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """The last one's state, placed as ``state`` (shapes with shardings) says, and its data iterator.

        Refuses a checkpoint of other tensors, and names the first.
        """
        step = self.latest()
        path = self.folder / str(step)
        items = {"state": ocp.args.StandardRestore(state), "data": ocp.args.JsonRestore()}
        try:
            with reported_once():
                self._check(path, self._manager.item_metadata(step)["state"], state)
                found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except _Mismatch as error:
            raise ValueError(f"--resume: {error}") from None
        except Exception as error:
            hint = "delete it to use the one before, if there is one"
            raise ValueError(f"{path} cannot be read: {reason(error)}; {hint}") from error
        return found["state"], found["data"]

    def _check(self, path: Path, there: Any, wanted: Any) -> None:
        there, wanted = _shapes(there), _shapes(wanted)
        for name in itertools.chain(wanted, there):
            if there.get(name) != wanted.get(name):
                found, want = there.get(name, "none"), wanted.get(name, "none")
                raise _Mismatch(f"{path}: {name} must have shape {want} for these options, got {found}")


class _Mismatch(ValueError):
    """A checkpoint of another model."""


def _shapes(tree: Any) -> dict[str, str]:
    """Shapes of all tensors by their names, parameters first."""
    tree = getattr(tree, "tree", tree)
    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if hasattr(x, "shape"):
            names = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path)
            found["/".join(map(str, names))] = str(list(x.shape))
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("params/")))


def last_good(folder: Path) -> str:
    """Names the last complete checkpoint in a folder."""
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()] if folder.is_dir() else []
    if not steps:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {folder / str(max(steps))}, and --resume goes on from there"
