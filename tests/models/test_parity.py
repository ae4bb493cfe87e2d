"""Whole models against the official equations (NumPy, float64)."""

from __future__ import annotations

import jax
import numpy as np
import official
import pytest
import small_models as small

TOLERANCE = 1e-5


@pytest.mark.parametrize("version, rate_scale", [(6, 1.0), (7, 1.0), (7, 2.0), (7, 0.0)])
def test_official_equations(version, rate_scale):
    model = small.model(version, **({"rate_scale": rate_scale} if version == 7 else {}))
    params, tokens, state = small.params(model), small.tokens(2, 11), small.random_state(model, 2)
    logits, new = jax.jit(model.apply)({"params": params}, tokens, state)
    assert logits.dtype == np.float32 and new.wkv.dtype == np.float32
    z = official.checkpoint(params, version)
    for b in range(2):
        row = tuple(np.asarray(x)[:, b] for x in (state.att_shift, state.ffn_shift, state.wkv))
        want, (att_shift, ffn_shift, wkv) = official.run(
            z, version, tokens[b], row, heads=small.HEADS, rate_scale=rate_scale
        )
        assert small.error(logits[b], want) < TOLERANCE
        assert small.error(new.att_shift[:, b], att_shift) < TOLERANCE
        assert small.error(new.ffn_shift[:, b], ffn_shift) < TOLERANCE
        assert small.error(new.wkv[:, b], wkv) < TOLERANCE


def test_oracle_notices_the_group_norm_eps(monkeypatch):
    """FLA's RWKV-6 default of 1e-5 is far outside the tolerance."""
    model = small.model(6, num_layers=1)
    params, tokens = small.params(model), small.tokens(1, 5)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0.02 if "value" in str(path) and "att" in str(path) else x, params
    )
    z = official.checkpoint(params, 6)
    want, _ = official.run(z, 6, tokens[0], heads=small.HEADS)
    norm = official.norm
    monkeypatch.setattr(official, "norm", lambda x, weight, bias, eps=1e-5: norm(x, weight, bias, 1e-5))
    wrong, _ = official.run(z, 6, tokens[0], heads=small.HEADS)
    got, _ = jax.jit(model.apply)({"params": params}, tokens)
    assert small.error(got[0], want) < TOLERANCE
    assert small.error(wrong, want) > 1e-2
