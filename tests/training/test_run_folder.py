"""Folders of runs: refused where files would be lost or mixed up, begun, resumed with the same facts."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.training import RunFolder, run_description

FACTS = {"seed": 0, "steps": 10, "data": None}


def zero():
    return {"step": jnp.zeros((), jnp.int32)}


def begin(folder, facts, step=None):
    with RunFolder(folder) as run:
        checkpoints, state, data = run.start(facts, zero, zero)
        assert (int(state["step"]), data) == (0, {})
        if step is not None:
            checkpoints.save(step, {"step": jnp.int32(step)}, {"next_index": step})
        checkpoints.close()
    return run


def resume(folder, facts, **more):
    with RunFolder(folder, resume=True) as run:
        checkpoints, state, data = run.start(facts, pytest.fail, zero, **more)
        checkpoints.close()
    return run, int(state["step"]), data


def tree(folder):
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


def test_earlier_runs_are_kept(tmp_path):
    """Each with all of its files, under the first free number; a link leads to the new run."""
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "real")
    (tmp_path / "disk" / "real-1").write_text("not a run")
    for seed in range(3):
        moved = begin(tmp_path / "run", {"seed": seed}).moved
        (tmp_path / "run" / "file").write_text(f"of {seed}")
        assert (moved and moved.name) == (f"real-{seed + 1}" if seed else None)
    assert (tmp_path / "run").is_symlink()
    found = {
        path.name: (path / "file").read_text() for path in (tmp_path / "disk").iterdir() if path.is_dir()
    }
    assert found == {"real": "of 2", "real-2": "of 0", "real-3": "of 1"}
    assert json.loads((tmp_path / "disk" / "real-2" / "options.json").read_text()) == {"seed": 0}


def test_a_state_that_cannot_be_made_moves_nothing(tmp_path):
    begin(tmp_path / "run", FACTS)
    before = tree(tmp_path)
    with pytest.raises(MemoryError), RunFolder(tmp_path / "run") as run:
        run.start({}, lambda: np.empty(2**50, np.uint8), zero)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("value", [Path("x"), float("nan"), [{1, 2}]])
def test_facts_that_are_not_json_move_nothing(tmp_path, value):
    begin(tmp_path / "run", FACTS, 7)
    before = tree(tmp_path)
    for is_resumed in (False, True):
        with (
            pytest.raises(ValueError, match=r"^facts: data must be a JSON value: "),
            RunFolder(tmp_path / "run", resume=is_resumed) as run,
        ):
            run.start(FACTS | {"data": value}, pytest.fail, zero)
    assert tree(tmp_path) == before


def test_the_same_facts_resume(tmp_path):
    """Also those that JSON has in another form."""
    facts = {"betas": (0.9, 0.99), "mesh": {1: ("data",)}}
    begin(tmp_path / "run", facts, 7)
    run, step, _ = resume(tmp_path / "run", facts)
    assert (step, run.changes) == (7, {})
    run, *_ = resume(tmp_path / "run", facts | {"betas": (0.9, 0.95)}, may_change={"betas"})
    assert run.changes == {"betas": ([0.9, 0.99], [0.9, 0.95])}


def test_resumption(tmp_path):
    """From the last checkpoint. Facts that may change are noted from then on, and new names are new facts."""
    begin(tmp_path / "run", FACTS | {"gone": 1}, 7)
    now = {"seed": 0, "steps": 20, "data": None, "new": True}
    for _ in range(2):
        run, step, data = resume(tmp_path / "run", now, may_change={"steps", "gone"})
        assert (step, data, run.moved) == (7, {"next_index": 7}, None)
        assert run.changes in ({"steps": (10, 20), "gone": (1, None)}, {})
        assert run_description(tmp_path / "run") == now
    assert run.changes == {}


def test_other_facts_are_refused(tmp_path):
    out = tmp_path / "run"
    begin(out, FACTS, 7)
    before = tree(tmp_path)
    message = f"^facts: seed was 0 in {out} and is 1 now, steps was 10 in {out} and is 20 now; resume with"
    with pytest.raises(ValueError, match=message):
        resume(out, {"seed": 1, "steps": 20, "data": None})
    with pytest.raises(ValueError, match=f"^facts: steps was 10 in {out} and is None now;"):
        resume(out, {"seed": 1}, may_change={"seed", "data"})
    assert tree(tmp_path) == before


def test_nothing_to_resume(tmp_path):
    with pytest.raises(ValueError, match=f"^resume: there is no run in {tmp_path}/run; begin one first"):
        RunFolder(tmp_path / "run", resume=True)
    begin(tmp_path / "run", FACTS)
    with pytest.raises(ValueError, match=f"^resume: there is no checkpoint in {tmp_path}/run yet"):
        resume(tmp_path / "run", FACTS)


@pytest.mark.parametrize(
    "folder, data, message",
    [
        (".", None, "folder: . is the current folder or one above it"),
        ("..", None, "folder: .. is the current folder or one above it"),
        ("file", None, "folder: file is a file, not a folder"),
        ("other", None, "folder: other contains other files than a run's"),
        ("texts", "texts/text", "data: texts/text is inside texts, which a new run moves aside"),
        ("texts/run", "texts", "folder: texts/run is inside the data, texts"),
        ("link/run", "texts", "folder: link/run is inside the data, texts"),
        ("r\udcff", None, "is not UTF-8"),
    ],
)
def test_refused_folders(tmp_path, monkeypatch, folder, data, message):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/text").write_text("text")
    Path("other/folder").mkdir(parents=True)
    Path("file").write_text("kept")
    os.symlink("texts", "link")
    before = tree(tmp_path)
    with pytest.raises(ValueError) as error:
        RunFolder(folder, data=data)
    assert message in str(error.value) and tree(tmp_path) == before


def test_a_folder_that_is_not_writable(tmp_path, monkeypatch):
    begin(tmp_path / "run", FACTS)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs tests as root may write all
    for is_resumed in (False, True):
        with pytest.raises(ValueError, match=r"^folder: .*run is not writable"):
            RunFolder(tmp_path / "run", resume=is_resumed)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, r"options\.json cannot be read: No such file"),
        ("{", r"options\.json cannot be read: Expecting"),
        ("[]", r"options\.json must contain a JSON object, got a list"),
    ],
)
def test_broken_descriptions(tmp_path, text, message):
    if text is not None:
        (tmp_path / "options.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        run_description(tmp_path)
