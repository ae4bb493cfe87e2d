"""What a server counts, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..generation import Completion
from .worker import Worker

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one server; several in one process do not share them."""

    def __init__(self, worker: Worker) -> None:
        self._registry = own = CollectorRegistry()
        self.answers = Counter("fla_jax_requests", "Requests answered", ["path", "status"], registry=own)
        self.cancelled = Counter("fla_jax_cancelled", "Requests whose client disconnected", registry=own)
        self.prompt_tokens = Counter("fla_jax_prompt_tokens", "Prompt tokens", registry=own)
        self.cached_tokens = Counter(
            "fla_jax_cached_tokens", "Prompt tokens whose state was cached", registry=own
        )
        self.new_tokens = Counter("fla_jax_completion_tokens", "Generated tokens", registry=own)
        self.first_token = Histogram(
            "fla_jax_first_token_seconds", "Time to the first token", buckets=_SECONDS, registry=own
        )
        self.whole = Histogram(
            "fla_jax_request_seconds", "Time of a whole request", buckets=_SECONDS, registry=own
        )
        running = Gauge("fla_jax_running", "Completions being decoded", registry=own)
        running.set_function(lambda: worker.running)
        waiting = Gauge("fla_jax_waiting", "Completions waiting for a slot", registry=own)
        waiting.set_function(lambda: worker.waiting)

    def count(self, completion: Completion) -> None:
        """Counts the tokens of a completion; its prompt with the first of several."""
        if completion.index == 0:
            self.prompt_tokens.inc(completion.usage.prompt_tokens)
            self.cached_tokens.inc(completion.usage.cached_tokens)
        self.new_tokens.inc(completion.usage.completion_tokens)

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)
