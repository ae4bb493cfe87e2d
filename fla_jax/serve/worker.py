"""The thread that runs a `Generator`, and the requests that a server's event loop submits to it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from ..generation import Event, Generator, Request, SamplingParams

_LOG = logging.getLogger(__name__)
_STOPPED = "the generator has stopped"
# Steps of a call of the decoding loop: a request that arrives waits for a call, a stream comes in such parts.
_STEPS = 4


class QueueFullError(Exception):
    """More requests wait than the limit allows."""


class StoppedError(Exception):
    """The worker does not run any more."""


class Job:
    """A request of one client: all completions of its prompts.

    Attributes:
        prompts: token sequences, or texts.
        sampling: how all of them are continued.
    """

    def __init__(self, prompts: Sequence[str] | Sequence[list[int]], sampling: SamplingParams) -> None:
        self.prompts, self.sampling = prompts, sampling
        self.requests: list[Request] = []
        self.cancelled = False
        self.completions = len(prompts) * sampling.n
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event] | Exception] = asyncio.Queue()

    def deliver(self, item: tuple[int, Event] | Exception) -> None:
        """Called by the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)
        except RuntimeError:  # the event loop is closed, so nobody waits for the answer
            self.cancelled = True

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The number of the choice (prompt by prompt) and the event, until all completions are over.

        Raises:
            ValueError, TypeError: the generator refused a prompt or a parameter; the message names it.
            StoppedError: the generator failed.
        """
        left = self.completions
        while left:
            item = await self._events.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1].completion is not None
            yield item


@dataclasses.dataclass
class _Submitted:
    """A request of the generator: its job, its first choice there, and its unfinished completions."""

    job: Job
    first: int
    unfinished: int


class Worker:
    """Runs a generator in a thread of its own; JAX calls never block the event loop.

    Attributes:
        generator: used by the thread alone once it is started.
        max_waiting: number of completions that may wait for a slot.
    """

    def __init__(self, generator: Generator, max_waiting: int) -> None:
        self.generator, self.max_waiting, self.slots = generator, max_waiting, generator.engine.slots
        generator.engine.steps = _STEPS
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._submitted: dict[int, _Submitted] = {}  # by number of the request
        self._lock = threading.Lock()
        self._unfinished = 0
        self._stopping = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fla_jax.serve", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step. Unfinished jobs get a `StoppedError`."""
        self._commands.put(self._stop)
        self._thread.join()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being answered."""
        return self._thread.is_alive() and not self._is_closed

    @property
    def running(self) -> int:
        """Number of completions that have a slot."""
        return min(self._unfinished, self.slots)

    @property
    def waiting(self) -> int:
        """Number of completions that wait for a slot."""
        return max(0, self._unfinished - self.slots)

    def submit(self, job: Job) -> None:
        """Hands a job to the thread.

        Raises:
            QueueFullError: it would leave more than ``max_waiting`` completions without a slot.
            StoppedError: the thread has ended.
        """
        with self._lock:
            if not self.is_healthy:
                raise StoppedError(_STOPPED)
            if self._unfinished + job.completions > self.slots + self.max_waiting:
                raise QueueFullError
            self._unfinished += job.completions
            self._commands.put(lambda: self._begin(job))

    def cancel(self, job: Job) -> None:
        """Frees the slots of a job, at the next step; it needs no answer any more."""
        self._commands.put(lambda: self._cancel(job))

    def _run(self) -> None:
        try:
            while not self._stopping:
                while not (self._commands.empty() and self._submitted):
                    self._commands.get()()
                    if self._stopping:
                        return
                for event in self.generator.step():
                    self._deliver(event)
        except Exception:  # a device that fails: every client is told, and /health
            _LOG.exception("the generator failed")
        finally:
            with self._lock:  # nothing is submitted from here on
                self._is_closed = True
            for job in {id(one.job): one.job for one in self._submitted.values()}.values():
                job.deliver(StoppedError(_STOPPED))
            while not self._commands.empty():
                self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _begin(self, job: Job) -> None:
        if self._is_closed:
            job.deliver(StoppedError(_STOPPED))
            return
        if job.cancelled:
            self._release(job.completions)
            return
        try:
            for i, prompt in enumerate(job.prompts):
                request = self.generator.submit(prompt, job.sampling)
                job.requests.append(request)
                n = job.sampling.n
                self._submitted[request.number] = _Submitted(job, i * n, n)
        except (ValueError, TypeError) as error:
            self._cancel(job)
            self._release((len(job.prompts) - len(job.requests)) * job.sampling.n)
            job.deliver(error)

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        for request in job.requests:
            request.cancel()

    def _deliver(self, event: Event) -> None:
        one = self._submitted[event.request.number]
        if not one.job.cancelled:
            one.job.deliver((one.first + event.index, event))
        if event.completion is not None:
            self._release(1)
            one.unfinished -= 1
            if not one.unfinished:
                del self._submitted[event.request.number]

    def _release(self, completions: int) -> None:
        with self._lock:
            self._unfinished -= completions
