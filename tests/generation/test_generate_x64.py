"""Generation with jax_enable_x64: both models in every precision, and the tokens that come without it."""

from __future__ import annotations

import jax
import numpy as np
import official
import pytest
import small_models as small
from harness import tiers

from fla_jax.generation import SamplingParams, generate, prefill, stream

PROMPTS = [[3, 5, 7, 1], [2]]
SAMPLING = SamplingParams(temperature=0.9, top_p=0.9, top_k=12, banned=(0,), stop_tokens=(4,))


def model_and_params(version, dtype):
    """Parameters are float32 numbers in every precision: the official model in NumPy reads those."""
    options = {"num_layers": 1, "implementation": "reference"}
    params = small.params(small.model(version, **options))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return small.model(version, dtype=dtype, param_dtype=dtype, **options), params


@pytest.mark.parametrize(
    "dtype",
    tiers.first(["float64", "float32", "bfloat16", "float16"], 2, (tiers.ONE_PYTHON, tiers.SLOW)),
)
@pytest.mark.parametrize("version", tiers.first([7, 6], 1, (tiers.ONE_PYTHON, tiers.SLOW)))
def test_every_precision(version, dtype):
    """The state after some tokens is the official model's, to the precision of the model; streaming
    gives the same tokens, and so does float32 without jax_enable_x64; a state passed on continues."""
    with jax.enable_x64(True):
        model, params = model_and_params(version, dtype)
        requests, state = generate(model, params, PROMPTS, 6, SAMPLING, seed=[2**40, -3])
        streamed = np.stack(list(stream(model, params, PROMPTS, 6, SAMPLING, seed=[2**40, -3])))
        for request, new in zip(requests, streamed.T):
            assert request.tolist() == new[new >= 0].tolist() and not {0, 4} & set(request.tolist())
        tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}[dtype]
        z = official.checkpoint(params, version)
        for i, request in enumerate(requests):
            _, want = official.run(z, version, [*PROMPTS[i], *request], heads=small.HEADS)
            for x, y in zip((state.att_shift, state.ffn_shift, state.wkv), want):
                assert small.error(x[:, i], y) < tolerance
        greedy = SamplingParams(temperature=0.0, presence_penalty=1.5)
        whole = generate(model, params, PROMPTS, 6, greedy).tokens
        logits, state = prefill(model, params, PROMPTS)
        assert logits.dtype == ("float64" if dtype == "float64" else "float32")
        assert [request[0] for request in whole] == np.argmax(logits, -1).tolist()
        again = generate(model, params, [[request[0]] for request in whole], 0, greedy, state=state)
        want = prefill(model, params, [[*prompt, request[0]] for prompt, request in zip(PROMPTS, whole)])[1]
        for x, y in zip(jax.tree.leaves(again.state), jax.tree.leaves(want)):
            assert small.error(x, y) < tolerance
    if dtype == "float32":
        without = generate(model, params, PROMPTS, 6, SAMPLING, seed=[2**40, -3]).tokens
        assert [request.tolist() for request in without] == [request.tolist() for request in requests]
