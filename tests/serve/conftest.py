from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import pytest
import small_models as small
from server_process import running

from fla_jax.checkpoints import save_checkpoint


class Served(NamedTuple):
    """A server's address, and the model of bytes that it serves as "tiny"."""

    url: str
    model: object
    params: object


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a model of bytes, the model, its parameters."""
    model = small.model(7, vocab_size=256, dtype=jnp.float32)
    params = small.params(model)
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    save_checkpoint(folder, model, params, tokenizer="bytes")
    return folder, model, params


@pytest.fixture(scope="session")
def served(checkpoint):
    folder, model, params = checkpoint
    options = ("--dtype", "float32", "--slots", "8", "--new-tokens", "2000", "--waiting", "64")
    with running(folder, *options) as (_, url):
        yield Served(url, model, params)
