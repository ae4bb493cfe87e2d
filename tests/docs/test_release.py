"""A release has one version everywhere, and a tag that differs is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import blocks
import pytest

import fla_jax

ROOT = blocks.ROOT


def test_the_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fla_jax.__version__"}
    assert f"\nversion: {fla_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_has_its_form():
    """Keep a Changelog: parts by release, the newest first, changes grouped by kind."""
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"\[(Unreleased|[\d.]+)\]( - \d{4}-\d\d-\d\d)?", name) for name in releases)
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_tag_that_differs_is_refused(tmp_path):
    """In a copy, since this version has no release yet."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "fla_jax").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    (tmp_path / "fla_jax" / "__init__.py").write_text('__version__ = "1.2.3"\n')

    def check(tag, changelog):
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        command = ["bash", ".ci/release", "--check", tag]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stderr

    released = "# Changelog\n\n## [1.2.3] - 2026-01-31\n"
    assert check("v1.2.3", released) == (0, "")
    for tag in ("v1.2.4", "1.2.3", "v1.2.30"):
        status, said = check(tag, released)
        assert status == 1 and f"tag {tag} is not v1.2.3" in said
    status, said = check("v1.2.3", "# Changelog\n\n## [Unreleased]\n")
    assert status == 1 and "## [1.2.3] - YYYY-MM-DD" in said


def test_workflows_name_what_exists():
    """Extras, commands and files; publishing needs no secret."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "\n".join(path.read_text() for path in (ROOT / ".github").rglob("*.yml"))
    text += (ROOT / "Makefile").read_text()
    for extras in re.findall(r'-e "\.\[([\w,]+)\]"', text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras
    for path in re.findall(r"(?:\.ci/\w+|benchmarks/\w+\.py|tests/\w+)", text):
        assert (ROOT / path).exists(), path
    assert "secrets." not in text and "id-token: write" in text and "show_versions()" in text
