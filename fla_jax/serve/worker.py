"""The thread that runs a `Generator`, and the requests that a server's event loop submits to it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from ..generation import Event, Generator, Request, SamplingParams

_LOG = logging.getLogger(__name__)
_STOPPED = "the generator has stopped"
# Steps of a call of the decoding loop: a request that arrives waits for a call, a stream comes in such parts.
_STEPS = 4
# A step that takes more seconds and leaves more objects has compiled a program; a large model alone only
# takes long.
_SLOW_STEP, _MANY_OBJECTS = 1.0, 10_000

_Delivery = tuple["Job", "tuple[int, Event] | Exception"]


class QueueFullError(Exception):
    """More requests wait than the limit allows."""


class StoppedError(Exception):
    """The worker does not run any more."""


class Job:
    """A request of one client: all completions of its prompts.

    Attributes:
        prompts: token sequences, or texts.
        sampling: how all of them are continued.
        streams: whether every event is wanted, or the first one and the ends alone.
    """

    def __init__(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        sampling: SamplingParams,
        *,
        streams: bool = True,
    ) -> None:
        self.prompts, self.sampling, self.streams = prompts, sampling, streams
        self.requests: list[Request] = []
        self.begun = self.cancelled = False  # the worker's
        self.completions = len(prompts) * sampling.n
        self._items: list[tuple[int, Event] | Exception] = []
        self._arrived = asyncio.Event()

    def put(self, item: tuple[int, Event] | Exception) -> None:
        """Called in the event loop."""
        self._items.append(item)
        self._arrived.set()

    async def events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """The number of the choice (prompt by prompt) and the event, until all completions are over.

        Those that have come since the last time are in one list: where clients are slow, there are fewer.

        Raises:
            ValueError, TypeError: the generator refused a prompt or a parameter; the message names it.
            StoppedError: the generator failed.
        """
        left = self.completions
        while left:
            await self._arrived.wait()
            self._arrived.clear()
            items, self._items = self._items, []
            events: list[tuple[int, Event]] = []
            for item in items:
                if isinstance(item, Exception):
                    raise item
                events.append(item)
                left -= item[1].completion is not None
            yield events


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
        """Starts the thread; jobs are of the event loop that runs."""
        self._loop = asyncio.get_running_loop()
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
            _freeze()
            while not self._stopping:
                while not (self._commands.empty() and self._submitted):
                    self._commands.get()()
                    if self._stopping:
                        return
                began = time.monotonic()
                self._deliver([item for event in self.generator.step() for item in self._taken(event)])
                if time.monotonic() - began > _SLOW_STEP and len(gc.get_objects()) > _MANY_OBJECTS:
                    _freeze()
        except Exception:  # a device that fails: every client is told, and /health
            _LOG.exception("the generator failed")
        finally:
            with self._lock:  # nothing is submitted from here on
                self._is_closed = True
            jobs = {id(one.job): one.job for one in self._submitted.values()}.values()
            self._deliver([(job, StoppedError(_STOPPED)) for job in jobs])
            while not self._commands.empty():
                self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _begin(self, job: Job) -> None:
        if self._is_closed:
            self._deliver([(job, StoppedError(_STOPPED))])
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
            self._deliver([(job, error)])

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        for request in job.requests:
            request.cancel()

    def _taken(self, event: Event) -> Iterator[_Delivery]:
        """What the job of an event gets."""
        one = self._submitted[event.request.number]
        job, is_over = one.job, event.completion is not None
        if not job.cancelled and (job.streams or is_over or not job.begun):
            job.begun = True
            yield job, (one.first + event.index, event)
        if is_over:
            self._release(1)
            one.unfinished -= 1
            if not one.unfinished:
                del self._submitted[event.request.number]

    def _deliver(self, items: list[_Delivery]) -> None:
        """Wakes the event loop, once for all events of a step: each time costs both threads."""
        try:
            if items:
                self._loop.call_soon_threadsafe(_put, items)
        except RuntimeError:  # the event loop is closed, so nobody waits for the answers
            for job, _ in items:
                job.cancelled = True

    def _release(self, completions: int) -> None:
        with self._lock:
            self._unfinished -= completions


def _freeze() -> None:
    """Leaves all objects out of later garbage collections: looking through JAX's programs takes 0.4 s.

    Objects that an earlier call left out are collected if nothing refers to them any more.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _put(items: list[_Delivery]) -> None:
    for job, item in items:
        job.put(item)
