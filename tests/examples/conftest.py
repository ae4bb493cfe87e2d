"""One cache of compiled programs for all examples, in this process and in those they start."""

import logging
import signal
import sys
from pathlib import Path

import jax
import pytest

# as Python does it for a program: the modules that the examples share lie beside them
sys.path.append(str(Path(__file__).parents[2] / "examples"))

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.1, "jax_persistent_cache_min_entry_size_bytes": 0}


@pytest.fixture(autouse=True, scope="module")
def compilation_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        settings = SETTINGS | {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
            before = getattr(jax.config, name)
            jax.config.update(name, value)
            settings[name] = before
        yield
        for name, before in settings.items():
            jax.config.update(name, before)


@pytest.fixture(autouse=True)
def restore_process():
    """Programs that run in this process set signal handlers, and a failed one stays silent."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    hook, levels = sys.unraisablehook, [logger.level for logger in loggers]
    yield
    sys.unraisablehook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}, and its double is {2 * i}.\n" for i in range(600)))
    return path
