"""Tied embeddings on eight fake devices: largest differences to one device. For test_on_devices.py."""

import jax
import numpy as np
import optax
import small_models as small
from jax.sharding import PartitionSpec as P

from fla_jax.generation import Generator, SamplingParams
from fla_jax.parallel import TrainStep, make_mesh, parameter_shardings
from fla_jax.training import chunked_loss, next_token_loss, token_logprobs

MESHES = {
    "all": (dict(data=2, fsdp=2, tensor=2), False),
    "sequence": (dict(sequence=4, tensor=2), False),
    "sequence, explicit": (dict(fsdp=2, sequence=2, tensor=2), True),
}
GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.0, frequency_penalty=0.0)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8]]


def chunked(model):
    return lambda params, tokens: chunked_loss(model, params, tokens, chunk_size=4)[0]


def logprobs(model):
    return lambda params, tokens: token_logprobs(model, params, tokens).mean()


def report(version):
    model = small.model(version, vocab_size=32, scan_layers=True, tie_embeddings=True)
    params, tokens = small.params(model), np.asarray(small.tokens(8, 9))
    losses = {"packed": next_token_loss(model), "chunked": chunked(model), "logprobs": logprobs(model)}
    wanted = {name: jax.jit(jax.value_and_grad(loss))(params, tokens) for name, loss in losses.items()}
    found = {}
    for where, (sizes, explicit) in MESHES.items():
        mesh = make_mesh(**sizes, explicit=explicit)
        for name, loss in losses.items():
            if name != "packed" and where != "sequence":
                continue
            step = TrainStep(model, optax.trace(0.9), mesh, loss)
            state, value = step(step.start(params), step.shard(tokens))
            kept = state.opt_state.trace
            assert kept["emb"]["embedding"].sharding.spec == P("tensor", "fsdp")
            found[f"{where}: {name}"] = small.largest_error((value, kept), wanted[name])
    mesh = make_mesh(data=4, tensor=2)
    placed = jax.device_put(params, parameter_shardings(model, mesh))
    got, want = (
        Generator(model, p, slots=3).generate(PROMPTS, GREEDY, max_tokens=4) for p in (placed, params)
    )
    found["tokens"] = float([list(x.tokens) for x in got] != [list(x.tokens) for x in want])
    return found
