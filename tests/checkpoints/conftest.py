from __future__ import annotations

import signal

import official
import pytest
import small_models as small


@pytest.fixture(autouse=True)
def in_time():
    """A read that waits for a writer would wait for ever."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(600)  # far above the time of any test, on any machine
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def tensors():
    return official.checkpoint(small.params(small.model(7)), 7)
