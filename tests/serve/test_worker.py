"""A generator that fails: every client is told, those whose request waits in the queue, too."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from fla_jax.generation import SamplingParams
from fla_jax.serve.worker import Job, StoppedError, Worker


class Broken:
    """A generator whose first step waits, and then fails."""

    def __init__(self):
        self.engine = SimpleNamespace(slots=4)
        self.may_fail, self.numbers = threading.Event(), iter(range(9))

    def submit(self, prompt, sampling):
        return SimpleNamespace(number=next(self.numbers), cancel=lambda: None)

    def step(self):
        self.may_fail.wait()
        raise RuntimeError("the device is lost")


def test_a_failure_reaches_every_job():
    async def clients():
        generator = Broken()
        worker = Worker(generator, max_waiting=4)
        worker.start()
        jobs = [Job([[1]], SamplingParams(n=n)) for n in (1, 2)]
        worker.submit(jobs[0])
        await asyncio.sleep(0.1)  # its step has begun
        worker.submit(jobs[1])
        generator.may_fail.set()
        for job in jobs:
            with pytest.raises(StoppedError):
                async for _ in job.events():
                    pass
        assert not worker.is_healthy
        with pytest.raises(StoppedError):
            worker.submit(Job([[1]], SamplingParams()))

    asyncio.run(asyncio.wait_for(clients(), 120))
