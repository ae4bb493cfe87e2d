"""Checkpoints of a training run: what is restored, and what is said of files that are broken or missing."""

import errno
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.training import TrainingCheckpoints, last_checkpoint

STATE = {"params": {"weight": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, "step": np.int32(3)}
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with TrainingCheckpoints(folder, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, jax.tree.map(jnp.asarray, STATE), {"next_index": step})
    return folder


def test_the_last_one_is_restored(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["20", "30"]
    assert last_checkpoint(folder) == folder / "30"
    for state in (None, SHAPES):
        found, data = TrainingCheckpoints(folder, read_only=True).restore(state)
        jax.tree.map(np.testing.assert_array_equal, found, STATE)
        assert data == {"next_index": 30}


def test_incomplete_ones_are_removed_but_by_a_reader(folder):
    left = folder / "40.orbax-checkpoint-tmp"
    left.mkdir()
    assert last_checkpoint(folder) == folder / "30"
    TrainingCheckpoints(folder, read_only=True).restore()
    assert left.exists()
    TrainingCheckpoints(folder).close()
    deadline = time.time() + 120  # they are removed in the background
    while left.exists() and time.time() < deadline:
        time.sleep(0.01)
    assert not left.exists()


def test_other_arrays_are_named(folder):
    checkpoints = TrainingCheckpoints(folder, read_only=True)
    wide = {**SHAPES, "params": {"weight": jax.ShapeDtypeStruct((2, 4), np.float32)}}
    with pytest.raises(ValueError, match=r"30: params/weight must have shape \[2, 4\], got \[2, 3\]"):
        checkpoints.restore(wide)
    with pytest.raises(ValueError, match=r"30: step must have shape none, got \[\]"):
        checkpoints.restore({"params": SHAPES["params"]})
    half = {**SHAPES, "params": {"weight": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}}
    with pytest.raises(ValueError, match="30: params/weight must have dtype bfloat16, got float32"):
        checkpoints.restore(half)


def test_saved_on_a_device_that_is_not_here(folder):
    sharding = folder / "30/state/_sharding"
    assert "cpu:0" in sharding.read_text()
    sharding.write_text(sharding.read_text().replace("cpu:0", "cuda:0"))
    found, _ = TrainingCheckpoints(folder, read_only=True).restore()
    jax.tree.map(np.testing.assert_array_equal, found, STATE)


def test_what_cannot_be_read(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty contains no checkpoint yet"):
        TrainingCheckpoints(tmp_path / "empty", read_only=True).restore()
    (folder / "30/state/manifest.ocdbt").write_text("broken")
    with pytest.raises(ValueError, match=r"30 cannot be read: .*; delete it to use the one before") as error:
        TrainingCheckpoints(folder, read_only=True).restore(SHAPES)
    assert "\n" not in str(error.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="checkpoints cannot be opened: Not a directory"):
        TrainingCheckpoints(tmp_path / "file" / "checkpoints")


def test_steps_must_rise(tmp_path):
    """A run that goes on in the folder of a later one would save nothing."""
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(10, STATE)
        for step in (5, 10):
            with pytest.raises(ValueError, match=rf"step must be above 10, the last .* got {step}$"):
                checkpoints.save(step, STATE)
        checkpoints.save(11, STATE)
        for step in (-1, 12.5, True):
            with pytest.raises(ValueError, match="step must be an integer >= 0"):
                checkpoints.save(step, STATE)
    assert last_checkpoint(tmp_path) == tmp_path / "11"


def test_an_error_behind_a_save_loses_nothing(tmp_path):
    with pytest.raises(KeyError), TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"weight": jnp.ones((300, 300))})
        raise KeyError("data")
    assert last_checkpoint(tmp_path) == tmp_path / "1"


def test_keys_and_python_numbers(tmp_path):
    """Keys of random numbers have another dtype on the disk; a new Flax TrainState has the step 0."""
    state = {"key": jax.random.key(3), "step": 0}
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for wanted in (state, jax.eval_shape(lambda: state)):
            found, _ = checkpoints.restore(wanted)
            assert found["step"] == 0 and found["key"].dtype == state["key"].dtype
            np.testing.assert_array_equal(*map(jax.random.key_data, (found["key"], state["key"])))
        with pytest.raises(ValueError, match=r"key must have shape \[4\], got \[2\]"):
            checkpoints.restore({"key": jax.random.key(3, impl="rbg"), "step": 0})


def test_a_reader_follows_the_run(tmp_path):
    """Also where the checkpoint that was the last one is deleted."""
    with TrainingCheckpoints(tmp_path, keep=1) as checkpoints:
        reader = TrainingCheckpoints(tmp_path, read_only=True)
        for step in (10, 20):
            checkpoints.save(step, STATE, {"next_index": step})
            checkpoints.wait()
            assert reader.restore(SHAPES)[1] == {"next_index": step}


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_at_least_one_is_kept(tmp_path, keep):
    with pytest.raises((ValueError, TypeError), match=f"keep must be an integer >= 1, got {keep}"):
        TrainingCheckpoints(tmp_path / "run", keep=keep)
    assert not (tmp_path / "run").exists()


def test_a_reader_cannot_save(tmp_path):
    """It would return as if the checkpoint were written."""
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(10, STATE)
    with TrainingCheckpoints(tmp_path, read_only=True) as reader:
        with pytest.raises(ValueError, match=f"^read_only must be False to save, got True for {tmp_path}$"):
            reader.save(20, STATE)
        assert reader.restore()[0]["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize("form", ["Error: [OS error {}: x]\nmore", "Failed [os_error_code='{}' x]", OSError])
def test_what_cannot_be_written(tmp_path, monkeypatch, code, form):
    """One line with the reason, and the last good checkpoint, whoever tells of the error."""
    error = OSError(code, os.strerror(code)) if form is OSError else RuntimeError(form.format(code))

    def fail(*args, **options):
        raise error

    checkpoints = TrainingCheckpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", fail)
    reason = f"7 cannot be written: {os.strerror(code)}; "
    with pytest.raises(ValueError, match=re.escape(reason) + "there is no checkpoint yet$"):
        checkpoints.save(7, STATE)
    (tmp_path / "5").mkdir()
    with pytest.raises(ValueError, match=re.escape(f"{reason}the last good checkpoint is {tmp_path}/5")):
        checkpoints.save(7, STATE)
