"""grpo.py: the loss and the advantages as written down in NumPy, and a reward that rises."""

from types import SimpleNamespace

import grpo
import jax
import numpy as np
import pytest
import small_models as small

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

PROMPTS = np.array([[7, 10, 5, 11], [1, 10, 2, 11]])
ANSWERS = np.array([[1, 2], [0, 3]])
SAMPLED = [[1, 2], [1, 0], [5, 5], [0, 3], [0, 3], [0, 3]]  # groups of three
REWARDS = np.array([[1, 0.5, 0], [1, 1, 1]])


def batch_of(rng):
    logprobs = rng.normal(-2, 0.3, (6, 2)).astype(np.float32)
    completions = [
        SimpleNamespace(tokens=np.array(tokens), logprobs=SimpleNamespace(chosen=chosen))
        for tokens, chosen in zip(SAMPLED, logprobs, strict=True)
    ]
    return grpo.pack(PROMPTS, ANSWERS, completions), logprobs


def test_loss():
    (batch, reward), old = batch_of(np.random.default_rng(0))
    assert reward == REWARDS.mean()
    deviations = REWARDS - REWARDS.mean(1, keepdims=True)
    advantages = (deviations / (REWARDS.std(1, keepdims=True) + 1e-3)).reshape(6)
    model = small.model(7, vocab_size=12, num_layers=1)
    params = small.params(model)
    gains, differences = [], []
    for i, (sampled, advantage) in enumerate(zip(SAMPLED, advantages, strict=True)):
        row = np.array([*PROMPTS[i // 3], *sampled])
        logits = np.asarray(model.apply({"params": params}, row[None])[0][0], np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for t in (0, 1):
            change = logprobs[3 + t, sampled[t]] - old[i, t]
            differences.append(abs(change))
            ratio = np.exp(change)
            gains.append(min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage))
    loss, difference = jax.jit(grpo.grpo_loss(model, 0.2))(params, batch)
    np.testing.assert_allclose(loss, -np.mean(gains), rtol=1e-4)
    np.testing.assert_allclose(difference, max(differences), rtol=1e-4)


def test_the_reward_rises():
    options = grpo.Options(steps=40, prompts=32, hidden_size=32, layers=1, learning_rate=4e-3)
    rewards, differences, _ = zip(*grpo.train(options))
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-10:]) > 0.35
    assert max(differences) < 1e-4  # of log-probabilities, between sampler and model
