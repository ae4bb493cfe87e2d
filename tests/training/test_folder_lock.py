"""A folder's lock: another process is told who has it; what a killed process leaves locks nothing."""

import builtins
import os
import subprocess
import sys

import pytest

from fla_jax.training import RunFolder, lock_folder

HOLDER = """
import sys
from fla_jax.training import RunFolder
with RunFolder("run"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "options.json").write_text("{}")
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_killed_process_locks_nothing(place):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], **pipes)
    try:
        assert holder.stdout.readline() == "locked\n"
        for name in ("run", "link"):
            with pytest.raises(ValueError, match=f"^folder: {name} is in use by process {holder.pid} on "):
                RunFolder(name).__enter__()
    finally:
        holder.kill()
        holder.communicate()
    assert (place / ".run.lock").read_text().startswith(f"{holder.pid} on ")
    with RunFolder("link") as run:
        run.check()
        assert (place / ".run.lock").read_text().startswith(f"{os.getpid()} on ")


def test_a_lost_folder_or_lock(place):
    lock = place / ".run.lock"
    with RunFolder("link") as run:
        (place / "run").rename("elsewhere")
        with pytest.raises(
            ValueError, match=r"^folder: link is gone, deleted or moved while the program ran"
        ):
            run.check()
        (place / "elsewhere").rename("run")
        with pytest.raises(ValueError, match=f"^folder: run is in use by process {os.getpid()} on "):
            RunFolder("run").__enter__()
        lock.unlink()
        run.check()  # nobody has come in meanwhile
        lock.write_text("1 on another\n")
        with pytest.raises(ValueError, match=r"^folder: link is now in use by process 1 on another"):
            run.check()
    assert lock.read_text() == "1 on another\n"  # the other one's


def test_folders_are_made(place):
    """The folder, where the lock is in it; else the one with the lock alone."""
    with lock_folder("results/new"):
        assert [path.name for path in (place / "results" / "new").iterdir()] == [".lock"]
    with RunFolder("other/run") as run, pytest.raises(ValueError, match=r"^folder: other/run is gone"):
        run.check()
    assert not [*(place / "results" / "new").iterdir(), *(place / "other").iterdir()]
    (place / "file").write_text("")
    with pytest.raises(ValueError, match=r"^folder: file is a file, not a folder"), lock_folder("file"):
        pass
    with pytest.raises(OSError, match=r"'file/new'"), lock_folder("file/new"):
        pass


def test_without_filelock(place, monkeypatch):
    found = builtins.__import__

    def lacking(name, *args, **options):
        if name == "filelock":
            raise ImportError(name)
        return found(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match="lock_folder needs filelock: pip install filelock"):
        RunFolder("run").__enter__()
