"""Text and stop strings of a request, from events of one token or of many."""

from __future__ import annotations

import types

import numpy as np
import pytest

from fla_jax.generation import SamplingParams, Usage, load_tokenizer
from fla_jax.generation.requests import Collector, joined_logprobs
from fla_jax.generation.rows import RowEvent


def cut(tokens, stop):
    """Tokens and text up to a stop string, from the texts of all beginnings."""
    for end in range(1, len(tokens) + 1):
        text = bytes(tokens[:end]).decode(errors="replace").rstrip("\ufffd")
        if places := [text.find(one) for one in stop if one in text]:
            return tokens[:end], text[: min(places)], True
    return tokens, bytes(tokens).decode(errors="replace"), False


@pytest.mark.parametrize("most", [1, 8, 40])
@pytest.mark.parametrize("stop", [(), ("ab",), ("abcd", "c"), ("ba", "a"), ("é", "b\n")])
def test_events_of_any_length_stop_at_the_same_token(stop, most):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tokens = np.concatenate([list(x.encode()) for x in rng.choice(["a", "b", "c", "d", "é", "\n"], 60)])
        tokens = tokens[rng.random(len(tokens)) > 0.05].astype(np.int32)  # some characters are broken
        row = types.SimpleNamespace(sampling=SamplingParams(stop=stop, logprobs=0), finish_reason=None)
        row.error, row.keep_state, row.prompt = None, False, types.SimpleNamespace(all_tokens=None)
        request = types.SimpleNamespace(number=0, rows=[row])
        collector = Collector(request, 0, Usage(1, 0, 0), load_tokenizer("bytes"))
        said, end, stopped = "", 0, False
        while end < len(tokens) and not stopped:
            start, end = end, end + int(rng.integers(1, most + 1))
            row.finish_reason = "length" if end >= len(tokens) else None
            new = tokens[start:end]
            event, text, stopped = collector.add(RowEvent(row, new, logprobs=new.astype(np.float32)))
            assert event.tokens.tolist() == event.logprobs.tolist()
            said += text
        found = collector.completion("stop" if stopped else "length")
        assert found.text == said
        assert (found.tokens.tolist(), said, stopped) == cut(tokens.tolist(), stop)


def test_small_vocabularies_have_fewer_log_probabilities():
    row, tops = types.SimpleNamespace(), np.ones((2, 12), np.float32)
    events = [RowEvent(row, np.zeros(n, np.int32)) for n in (0, 2)]
    events[1] = events[1]._replace(logprobs=tops[:, 0], top_tokens=tops.astype(np.int32), top_logprobs=tops)
    assert joined_logprobs(events, 20).top.shape == (2, 12)
    assert joined_logprobs(events[:1], 20).top.shape == (0, 20)


class Metaspace:
    """Writes a space before every word but a text's first, as Llama's vocabulary does."""

    def decode(self, tokens):
        return " ".join(["zero", "one", "two"][token] for token in tokens)


def test_text_after_a_prompt_begins_with_its_space():
    row = types.SimpleNamespace(sampling=SamplingParams(), finish_reason=None)
    request = types.SimpleNamespace(number=0, rows=[row])
    for prompt, want in (((), "one two"), ([0, 2], " one two")):
        collector = Collector(request, 0, Usage(1, 0, 0), Metaspace(), prompt)
        assert "".join(collector.add(RowEvent(row, np.array([t])))[1] for t in (1, 2)) == want
