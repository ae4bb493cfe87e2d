"""A family of models from outside the package: a layer, a row of FAMILIES, a param map."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small

from fla_jax.checkpoints import PARAM_MAPS, ParamMap, load_checkpoint, save_checkpoint
from fla_jax.checkpoints.param_maps import TensorRef
from fla_jax.checkpoints.param_maps.official import NAMES, PREFIX
from fla_jax.checkpoints.param_maps.param_map import UNIT_AXES, dense, model_refs
from fla_jax.generation import Decoder, SamplingParams, generate
from fla_jax.layers import Attention, RWKV7FeedForward
from fla_jax.layers.init import computed, orthogonal
from fla_jax.models import (
    FAMILIES,
    Family,
    RWKVConfig,
    RWKVForCausalLM,
    Size,
    family_of,
    stack_layers,
    unstack_layers,
)
from fla_jax.ops import chunk_rwkv6, fused_recurrent_rwkv6
from fla_jax.training import cross_entropy, rwkv_optimizer


class ToyAttention(Attention):
    """Linear attention with a constant decay for each channel."""

    @nn.compact
    def __call__(self, x, state=None, v_first=None, *, segment_ids=None, lengths=None, norm=None):
        call = self.prepare(x, state, segment_ids, lengths, norm)
        tp = call.enter_tp()
        mix = call.vector("mu", computed(lambda: self.depth.mix(self.depth.falling)), None)
        mixed = tp.shift_mix([mix])
        names = ("receptance", "key", "value")
        r, k, v = (
            tp.heads(tp.dense(n, self.hidden_size, orthogonal(1.0), ("embed", "heads"), mixed.mixed[0]))
            for n in names
        )
        decay = call.head_vector("decay", lambda: -1.0)
        w = jnp.broadcast_to(-jnp.exp(decay), k.shape).astype(k.dtype)
        u = call.head_vector("bonus", lambda: 0.5)
        o, wkv = call.recurrence(chunk_rwkv6, fused_recurrent_rwkv6, (r, k, v, w, u))
        y = call.dense("output", self.hidden_size, orthogonal(0.1), ("heads", "embed"), o.reshape(x.shape))
        return y, call.state.replace(att_shift=mixed.last, wkv=wkv), None


@dataclasses.dataclass(frozen=True)
class ToyConfig(RWKVConfig):
    model_type = "toy"


class ToyForCausalLM(RWKVForCausalLM):
    config: ToyConfig


TOY = Family(
    "Toy",
    ToyConfig,
    ToyForCausalLM,
    ToyAttention,
    RWKV7FeedForward,
    sizes={"head_dim": Size("att/decay", 1), "intermediate_size": Size("ffn/key/kernel", 1)},
)
LAYER = r"blocks\.([0-9]+)\."
PROJECTIONS = ("receptance", "key", "value", "output")
REFS = model_refs(
    NAMES,
    att={f"blocks/att/{name}": TensorRef(f"blocks.{{}}.att.{name}") for name in ("mu", "decay", "bonus")}
    | dense("blocks/att", "blocks.{}.att", " ".join(PROJECTIONS)),
    ffn={"blocks/ffn/x_k": TensorRef("blocks.{}.ffn.x_k", UNIT_AXES)}
    | dense("blocks/ffn", "blocks.{}.ffn", "key value"),
)
# a model has no norm after the recurrence
REFS = {path: ref for path, ref in REFS.items() if "ln_x" not in path}
MAP = ParamMap("the toy's names", "official", TOY, LAYER + r"att\.decay", LAYER, REFS, prefix=PREFIX)
CONFIG = ToyConfig(vocab_size=24, hidden_size=32, num_layers=2, head_dim=16)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    PARAM_MAPS.append(MAP)
    yield
    PARAM_MAPS.remove(MAP)


def test_a_family_trains_saves_loads_and_generates(tmp_path):
    model, tokens = ToyForCausalLM(CONFIG), small.tokens(2, 9)
    assert family_of(CONFIG) is TOY and RWKVConfig.from_dict(CONFIG.to_dict()) == CONFIG
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    tx = rwkv_optimizer(1e-2)

    @jax.jit
    def step(params, state):
        loss = lambda params: cross_entropy(model.apply({"params": params}, tokens[:, :-1])[0], tokens[:, 1:])
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for _ in range(5):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]

    save_checkpoint(tmp_path / "toy.pth", model, params)
    loaded, got = load_checkpoint(tmp_path / "toy.pth")
    assert type(loaded) is ToyForCausalLM and loaded.config.head_dim == 16
    jax.tree.map(np.testing.assert_array_equal, got, params)
    scanned, stacked = load_checkpoint(tmp_path / "toy.pth", scan_layers=True)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), stacked)
    with pytest.raises(ValueError, match="PARAM_MAPS must have a map of Toy of the scheme 'fla'"):
        save_checkpoint(tmp_path / "folder", model, params, format="huggingface")

    # the model itself decodes: greedy tokens are those of a call on the whole text
    assert Decoder(model, params).implementation == "model"
    (completion,) = generate(scanned, stacked, [[1, 2, 3]], SamplingParams.policy(0), max_tokens=4)
    text = [1, 2, 3]
    for _ in range(4):
        logits, _ = model.apply({"params": params}, jnp.array([text]))
        text.append(int(jnp.argmax(logits[0, -1])))
    assert completion.tokens.tolist() == text[3:]


def test_a_config_of_another_family_is_refused():
    with pytest.raises(TypeError, match="of ToyForCausalLM needs that class, got ToyConfig in RWKV7"):
        small.model(7).clone(config=CONFIG).init(jax.random.key(0), small.tokens(1, 2))
    with pytest.raises(TypeError, match=r"must be one of the families' \(RWKV6Config, .*, got RWKVC"):
        family_of(RWKVConfig(vocab_size=24, hidden_size=32, num_layers=2, head_dim=16))
