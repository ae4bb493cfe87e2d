"""What the worker's thread tells clients: events of each step, and failures, also to those in the queue."""

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


class Steps:
    """A generator whose every step gives each request an event; the fourth one ends it."""

    def __init__(self):
        self.engine = SimpleNamespace(slots=4)
        self.requests, self.steps = [], 0

    def submit(self, prompt, sampling):
        self.requests.append(SimpleNamespace(number=len(self.requests), cancel=lambda: None))
        return self.requests[-1]

    def step(self):
        self.steps += 1
        completion = "the end" if self.steps == 4 else None
        events = [
            SimpleNamespace(request=one, index=0, step=self.steps, completion=completion)
            for one in self.requests
        ]
        self.requests = self.requests if completion is None else []
        return events


def test_a_step_wakes_the_event_loop_once(monkeypatch):
    """Streams get every event in order, other requests the first and the last one."""

    async def clients():
        loop, wakes = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (wakes.append(call), wake(*call)))
        generator = Steps()
        worker = Worker(generator, max_waiting=4)
        jobs = [Job([[1], [2]], SamplingParams(), streams=streams) for streams in (True, False)]
        worker.start()
        worker._commands.put(lambda: [worker._begin(job) for job in jobs])  # both before the first step
        got = [[(i, event.step) async for some in job.events() for i, event in some] for job in jobs]
        assert got == [[(i, step) for step in range(1, 5) for i in range(2)], [(0, 1), (0, 4), (1, 4)]]
        assert len(wakes) == generator.steps == 4
        await asyncio.to_thread(worker.stop)

    asyncio.run(asyncio.wait_for(clients(), 120))


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
