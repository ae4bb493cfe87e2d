"""Every Python block of every page runs as it is written, and does what the text around it says."""

from __future__ import annotations

import blocks
import jax
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

PAGES = sorted(
    str(path.relative_to(blocks.ROOT))
    for path in (blocks.ROOT / "docs").rglob("*.md")
    if ".zh." not in path.name and blocks.blocks(str(path.relative_to(blocks.ROOT)))
)
CHECKED_BELOW = (
    "docs/data.md",
    "docs/generation.md",
    "docs/tuning.md",
    "docs/long_contexts.md",
    "docs/models.md",
    "docs/reinforcement.md",
    "docs/start.md",
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Pages write files."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHECKED_BELOW])
def test_page(page):
    blocks.run(page)


def test_start(capsys):
    assert blocks.run("docs/start.md")["loss"] < 1.5
    out = capsys.readouterr().out
    assert len(out.splitlines()[0]) == 20 and "chunk_rwkv7" in out


def test_data():
    """The step learns, and carries states that are not zeros."""
    names = blocks.run("docs/data.md")
    assert names["losses"][-1] < names["losses"][0] - 0.5
    assert np.abs(names["state"].carry.wkv).max() > 0


def test_reinforcement():
    """Sampler and model agree before an update of the same parameters."""
    differences = blocks.run("docs/reinforcement.md")["differences"]
    assert len(differences) == 3 and max(differences) < 1e-4


def test_generation(capsys):
    """The parts add up, a prefix is found, one request is cancelled."""
    names = blocks.run("docs/generation.md")
    assert [len(output.tokens) for output in (*names["outputs"], *names["more"])] == [20, 20, 5, 5]
    assert len(names["several"]) == 3 and len(names["rollout"].logprobs.chosen) == 10
    assert names["scores"].shape == (len(" upon a time"),)
    assert names["answer"].usage.cached_tokens == len("You answer in one word. ")
    np.testing.assert_array_equal(names["same"].tokens, names["answer"].tokens)
    assert len(names["first"].tokens) == len(names["rest"].tokens) == 6
    assert "cancelled" in capsys.readouterr().out and names["request"].done


def test_tuning():
    """Tuned, saved, loaded, generating; tests/training says that states learn."""
    names = blocks.run("docs/tuning.md", "State tuning")
    assert names["losses"].shape == (20,) and np.isfinite(names["losses"]).all()
    assert names["states"].shape == (2, 1, 64, 64) and len(names["completion"].tokens) == 5


def test_models():
    """The hybrid is causal, and every parameter that begins at other values than zero takes part."""
    names = blocks.run("docs/models.md")
    np.testing.assert_allclose(names["logits"], names["model"].apply(names["variables"], names["tokens"])[0])
    hybrid, params, tokens = (names[name] for name in ("hybrid", "hybrid_params", "tokens"))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)
    logits = hybrid.apply({"params": params}, tokens)
    changed = hybrid.apply({"params": params}, tokens.at[0, 20].set(7)) - logits
    assert np.abs(changed[0, :20]).max() == 0 and np.abs(changed[0, 20:]).max(1).min() > 0
    assert {*params} > {"blocks_0", "blocks_1", "attention_2"}


def test_lora():
    """The pairs learn, and merged parameters have their logits."""
    names = blocks.run("docs/tuning.md", "LoRA")
    params, tuned, tokens = (names[name] for name in ("params", "tuned", "tokens"))
    logits = names["model"].apply({"params": tuned}, tokens)[0]
    np.testing.assert_allclose(logits, names["logits"], atol=1e-4)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(names["state"].params))
    changed = names["model"].apply({"params": params}, tokens)[0] - logits
    assert np.abs(changed).max() > 1e-3


def test_long_contexts():
    names = blocks.run("docs/long_contexts.md")
    assert np.isfinite(names["loss"]) and names["state"].wkv.shape == (2, 1, 1, 64, 64)
    assert names["loss"] == pytest.approx(float(names["exact"](names["params"])[0][0]), rel=1e-5)


def test_a_block_that_fails_is_found(tmp_path, monkeypatch):
    """The extractor finds every fence of a page."""
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "# A\n\n```python\nx = 1\n```\n\n## B\n\n* list\n\n  ```python\n  assert x == 2, 'seen'\n  ```\n"
    )
    assert blocks.blocks("page.md") == ["x = 1\n", "assert x == 2, 'seen'\n"]
    assert blocks.blocks("page.md", "B") == ["assert x == 2, 'seen'\n"]
    with pytest.raises(AssertionError, match="seen"):
        blocks.run("page.md")
