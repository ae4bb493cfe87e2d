"""Folders of runs: earlier ones are moved aside, changes are found, broken descriptions are named."""

import json

import pytest

from fla_jax.training import describe_run, run_changes, run_description, start_run


def test_earlier_runs_are_kept(tmp_path):
    """Each with all of its files, under the first free number; a link leads to the new run."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "real")
    (tmp_path / "disk" / "real-1").write_text("not a run")
    for seed in range(3):
        aside = start_run(tmp_path / "run", {"seed": seed})
        (tmp_path / "run" / "file").write_text(f"of {seed}")
        assert (aside and aside.name) == (f"real-{seed + 1}" if seed else None)
    assert (tmp_path / "run").is_symlink()
    found = {
        path.name: (path / "file").read_text() for path in (tmp_path / "disk").iterdir() if path.is_dir()
    }
    assert found == {"real": "of 2", "real-2": "of 0", "real-3": "of 1"}
    assert json.loads((tmp_path / "disk" / "real-2" / "options.json").read_text()) == {"seed": 0}


def test_a_folder_without_a_run_stays(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("kept")
    assert start_run(tmp_path / "run", {}) is None
    assert (tmp_path / "run" / "file").read_text() == "kept" and run_description(tmp_path / "run") == {}


def test_changes(tmp_path):
    """Names that are new do not count: an option that an older program did not have."""
    describe_run(tmp_path, {"steps": 10, "data": None, "gone": 1, "same": [1]})
    now = {"steps": 20, "data": None, "same": [1], "new": True}
    assert run_changes(tmp_path, now) == {"steps": (10, 20), "gone": (1, None)}


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
