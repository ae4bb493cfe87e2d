"""Evaluates a model with the tasks of lm-eval (EleutherAI's language model evaluation harness).

    pip install lm-eval

    from lm_eval import simple_evaluate
    from lm_eval_adapter import GeneratorLM

    model, params = load_checkpoint("RWKV-x070-World-0.1B.pth", dtype="bfloat16")
    generator = Generator(model, params, slots=64, tokenizer=load_tokenizer(vocab_size=65536))
    print(simple_evaluate(GeneratorLM(generator), tasks=["lambada_openai"])["results"])

Texts are read whole, whatever their length: a recurrent model has no longest context. Without lm-eval the
class works with any requests that have ``args``. Source of the interface: ``lm_eval.api.model`` of 0.4.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fla_jax.generation import Generator, SamplingParams

try:
    from lm_eval.api.model import LM
except ImportError:
    LM = object

# Names of the number of new tokens in lm-eval's tasks; the first that is given counts
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class GeneratorLM(LM):
    """lm-eval's ``LM`` on a `Generator` with a tokenizer; ``first`` is the token before a text."""

    def __init__(self, generator: Generator, first: int | None = None) -> None:
        super().__init__()
        self.generator, self.encode = generator, generator.tokenizer.encode
        self.first = (getattr(generator.tokenizer, "end_of_text", None) or 0) if first is None else first

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both; spaces between them belong to the continuation, as in lm-eval's own models."""
        start = context.rstrip()
        before = self.encode(start)
        after = self.encode(start + context[len(start) :] + continuation)[len(before) :]
        return before or [self.first], after

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding returns it."""
        pairs = [self.pair(*request.args) for request in requests]
        prompts, continuations = [list(side) for side in zip(*pairs, strict=True)] or ([], [])
        rules = [SamplingParams.policy(0.0, max_tokens=len(x), ignore_eos=True) for x in continuations]
        greedy = [completion.tokens.tolist() for completion in self.generator.generate(prompts, rules)]
        scores = self.generator.score(prompts, continuations)
        return [(float(s.sum()), g == x) for s, g, x in zip(scores, greedy, continuations, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text after ``first``."""
        texts = [self.encode(request.args[0]) for request in requests]
        scores = iter(self.generator.score([[self.first]] * sum(map(bool, texts)), [x for x in texts if x]))
        return [float(next(scores).sum()) if text else 0.0 for text in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each context up to one of the texts ``until``.

        Samples where ``do_sample`` says so, or a temperature above zero without it, as lm-eval's own models.
        """
        rules = []
        for _, options in (request.args for request in requests):
            until = options.get("until") or ()
            until = tuple(filter(None, (until,) if isinstance(until, str) else until))
            sample = options.get("do_sample")
            temperature = 0.0 if sample is False else options.get("temperature", 1.0 if sample else 0.0)
            limits = [options[name] for name in LIMITS if options.get(name) is not None]
            own = {name: options[name] for name in ("top_p", "top_k", "min_p") if name in options}
            own |= {"stop": until, "max_tokens": int(limits[0]) if limits else 256}
            rules.append(SamplingParams.policy(float(temperature), **own))
        prompts = [self.encode(request.args[0]) or [self.first] for request in requests]
        return [completion.text or "" for completion in self.generator.generate(prompts, rules)]
