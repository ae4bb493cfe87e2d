"""A process of clients: threads that send one completion after the other. Without JAX."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
from typing import Any

from serving.load import Load, Timed

END = 15  # seconds before the time is over no request begins


def ask(connection: http.client.HTTPConnection, prompt: list[int], new: int, streams: bool) -> Timed:
    """One completion: when it began, when its first token came, when it ended, how many tokens it has.

    Raises:
        ValueError: the answer is not a completion of ``new`` tokens.
    """
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    began, first, last = time.monotonic(), None, b""
    connection.request("POST", "/v1/completions", json.dumps(body))
    with connection.getresponse() as answer:
        if streams and answer.status == 200:
            for line in answer:
                if line.startswith(b"data: {"):
                    first, last = first or time.monotonic(), line[6:]
        else:
            last = answer.read()
    ended, found = time.monotonic(), json.loads(last)
    if "usage" not in found or found["usage"]["completion_tokens"] != new:
        raise ValueError(f"status {answer.status}: {last[:200]!r}")
    return Timed(began, first, ended, new)


def client(settings: dict[str, Any]) -> Any:
    """The job of a process of clients: their requests, each with its times or its error."""
    load = Load(**settings["load"])

    def run(job: dict[str, Any]) -> dict[str, Any]:
        todo = iter(load.requests()[job["index"] :: job["of"]])  # all threads take from it
        done: list[Timed | str] = []

        def one(number: int) -> None:
            connection = http.client.HTTPConnection(job["address"], timeout=60)
            time.sleep(max(0, job["start"] + load.ramp * number / load.clients - time.monotonic()))
            for prompt, new in todo:
                if time.monotonic() > job["until"] - END:
                    return
                try:
                    done.append(ask(connection, prompt, new, streams=number % 2 == 0))
                except Exception as error:
                    done.append(f"{type(error).__name__}: {error}"[:300])
                    connection.close()

        # numbers of clients alternate between processes in pairs, so that every process has both kinds
        own = [i for i in range(load.clients) if i // 2 % job["of"] == job["index"]]
        with concurrent.futures.ThreadPoolExecutor(max(1, len(own))) as pool:
            list(pool.map(one, own))
        return {"done": done}

    return run
