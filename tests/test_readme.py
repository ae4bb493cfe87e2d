"""The README's Python blocks run as they are written, and do what the text around them says."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def fast_compile():
    """Compile time is most of the time here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def block(section):
    """The Python block of a section."""
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    # the reference implementation compiles in a fraction of the time
    code, names = code.replace("num_layers=2", 'num_layers=2, implementation="reference"'), {}
    exec(compile(code, f"README.md, {section}", "exec"), names)
    return names


def test_generation(capsys):
    names = block("Generation")
    assert [len(row) for row in names["rows"]] == [20, 20]
    assert len(capsys.readouterr().out.splitlines()) >= 21


def test_lora():
    """The frozen parameters stay, the merged ones learn; at the start the product is 0; stacked layers and
    one layer alike.
    """
    names = block("State tuning and LoRA")
    model, params, tokens, cross_entropy = (
        names[name] for name in ("model", "params", "tokens", "cross_entropy")
    )
    loss = lambda p: float(cross_entropy(model.apply({"params": p}, tokens[:, :-1])[0], tokens[:, 1:]))
    fresh = names["init_lora"](jax.random.key(1), params)
    jax.tree.map(np.testing.assert_array_equal, names["merge"](params, fresh), params)
    assert len(fresh) == 12 and all("att" in path or "ffn" in path for path in fresh)
    assert loss(names["tuned"]) < loss(params) - 0.05
    assert all(np.abs(matrix).max() > 0 for pair in names["lora"].values() for matrix in pair.values())
    stacked = {"blocks": {"att": {"key": {"kernel": np.ones((3, 4, 5), np.float32)}}}}
    assert names["merge"](stacked, names["init_lora"](jax.random.key(0), stacked, rank=2))["blocks"]["att"][
        "key"
    ]["kernel"].shape == (3, 4, 5)


def test_long_contexts():
    names = block("Long contexts")
    assert np.isfinite(names["loss"]) and names["state"].wkv.shape == (2, 1, 1, 64, 64)
    assert names["loss"] == pytest.approx(float(names["exact"](names["params"])[0][0]), rel=1e-5)
