"""Benchmarks are programs: their modules have plain names, which other tests must not find."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def command():
    """``command("ops.py", "--quick", ...)`` runs one on the CPU and returns what it printed."""

    def run(name, *arguments, **variables):
        done = subprocess.run(
            [sys.executable, str(FOLDER / name), *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def module(monkeypatch):
    """``module("steps.sizes")`` imports one."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FOLDER)):
            del sys.modules[name]
