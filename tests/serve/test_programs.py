"""Programs of a server: the folder that keeps them, and those that are compiled before it answers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest
import small_models as small

from fla_jax.generation import Generator, SamplingParams
from fla_jax.serve.programs import keep_programs, warm_up

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
# prints how many programs were in the cache, and how many were not
COUNTS = """
import collections, sys
import jax
from fla_jax.checkpoints import load_checkpoint
from fla_jax.generation import Generator
from fla_jax.serve.programs import keep_programs, warm_up

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
keep_programs(sys.argv[2])
warm_up(Generator(*load_checkpoint(sys.argv[1]), slots=2), 1)
print(counts["cache_hits"], counts["cache_misses"])
"""


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """JAX as without a cache, and the user's folder of caches."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name in SETTINGS:
        monkeypatch.delenv(name.upper(), raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def folder():
    return jax.config.jax_compilation_cache_dir


def test_default_folder(tmp_path, monkeypatch):
    keep_programs(None)
    assert folder() == str(tmp_path / "caches/fla_jax/programs") and os.path.isdir(folder())
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    keep_programs(None)
    assert folder() == str(tmp_path / "home/.cache/fla_jax/programs")


def test_the_folder_that_jax_has(tmp_path, monkeypatch):
    """Thresholds of the environment stay, too."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    keep_programs(None)
    assert folder() == "gs://bucket/programs" and not (tmp_path / "caches").exists()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7
    keep_programs(str(tmp_path / "named"))
    assert folder() == str(tmp_path / "named")


def test_none(tmp_path):
    keep_programs("")
    assert not jax.config.jax_enable_compilation_cache and not (tmp_path / "caches").exists()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """One that was named is an error; without the default one there is no cache."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/programs"):
        keep_programs(str(tmp_path / "file/programs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_programs(None)
    assert folder() is None
    assert capsys.readouterr().err.startswith("Compiled programs are not kept for the next start: ")


@pytest.mark.slow
def test_the_server_names_the_folder_that_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    command = [
        sys.executable,
        "-m",
        "fla_jax.serve",
        "none.pth",
        "--compilation-cache",
        str(tmp_path / "file/x"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("--compilation-cache: ") and "file/x" in line


@pytest.mark.slow
def test_the_second_process_compiles_nothing(checkpoint, tmp_path):
    def counts(cache):
        command = [sys.executable, "-c", COUNTS, str(checkpoint[0]), cache]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(count) for count in done.stdout.split()]

    hits, misses = counts(str(tmp_path))
    assert misses > 5
    assert counts(str(tmp_path)) == [hits + misses, 0]
    assert counts("") == [0, 0]
    assert not (pathlib.Path(os.environ["XDG_CACHE_HOME"])).exists()


@pytest.mark.slow
def test_prompts_up_to_the_length_need_no_other_program():
    """Alone and as many together as are read together; a longer one needs another."""
    model = small.model(7, vocab_size=253)  # of this test alone: no other one has compiled for it
    generator = Generator(model, small.params(model), slots=4)
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    warm_up(generator, 40)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in (1, 5, 16, 17, 32, 40):
            for count in (1, 3, 4):
                prompts = [[1 + i] * length for i in range(count)]
                generator.generate(prompts, SamplingParams(temperature=0.7, top_k=5, max_tokens=20))
        assert not compiled
        generator.generate([[1] * 60], max_tokens=1)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
