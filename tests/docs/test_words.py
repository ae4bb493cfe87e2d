"""Pages use the field's words, one for each thing, name what exists, and stay within their lengths."""

from __future__ import annotations

import re

import blocks
import pytest

# pattern of an old word: the word to use
OLD_WORDS = {
    r"stretch(es)?": "split",
    r"(?<!\.)walk(s|ed|ing)?": "scan",
    r"launchers?": "host code",
    r"transfer (kernels?|pass(es)?)": "chunk_state kernel",
    r"(carry|gradients) kernels?": "bwd_dh, bwd_grads",
    r"(combine|gather|reads) kernels?": "state_passing, state_grad, add_entry_output",
    r"keys (as|are) rows|takes_rows|by_rows": "key-major, key_major",
    r"kept[ _](states?|axes)|states? (is|are) kept": "state buffers, saved states, residual_axes",
    r"any[- _]decays?|forms? for any decay|needs_any_decay": "unsafe gate, unsafe_gate",
    r"bounded (forms?|decays?)|decays? (is|are) bounded": "safe gate, safe_gate",
    r"entering states?|states? that enters?|leaving states?|states? that leaves?": "h0, ht",
    r"own_rows|rows? of (its|their|one's) own": "TP region, enter_tp",
    r"act_(embed|heads|mlp|vocab)": "activation_embed, activation_heads, ...",
    r"in_pieces|fused pieces?|pieces of (a|the) (layers?|prompts?)": "microbatch, layer operation, chunk",
    r"(?-i:[Nn]amings?)": "param map",
    r"the house|rooms?": "import layers, package",
    r"mendable|occurrences": "fixable, TokenCounts",
    r"in (two|three) parts|in_parts|two_parts": "bf16x2, bf16x3, tf32x3",
    r"the scores|scores? of pairs|inverses": "A (A_qk, A_ak, ...), A_ab_inv",
    r"(a|the|own) windows?": "checkpoint interval",
    r"last token's row|moved mixes|its moves": "prev, mix_delta",
}
# also wrong in the prose of pages, though a good word elsewhere
OLD_WORDS_OF_PAGES = {
    r"rows (of|and|or|over|that|are|to)|(its|few|all|own) rows": "batch element, sequence, request, example",
    r"(each|every|per|one|long|packed) row|rows? and heads?": "batch element, sequence, request, example",
    r"pieces?": "chunk, microbatch, layer operation",
    r"alive|hands? (on|over)|handed (on|over)": "active, pass",
    r"columns?": "key",
}
# phrases for which a page has plainer ones
BANNED = {
    r"through and through|by (itself|themselves|himself)": "automatically, alone",
    r"nothing of the above|(is|are) told|stands? behind": "say what is true",
    r"hands? (it|them)|takes? over|makes? room": "pass, replace, free",
    r"a row that|nevertheless|anew|has a say": "request, still, again, is active",
    r"lies|lying|stands|mend(s|ed)?|wants": "is, fix, needs",
    r"(for|in|from) (a|an) (program|loss|model|training) of your own": "in your own program",
    r"likewise|from nothing|memory to spare|nobody|goes by": "say which",
    r"not because of|what (stands|moves|differs|happens) (behind|between|where)": "name the subject",
    r"it's|don't|can't|very|simply|just|easily|of course|obviously|please note": "leave it out",
    r"blazing(ly)?|seamless(ly)?|powerful|state-of-the-art|leverages?": "a number with its condition",
}
CODE = ["pallas", "fla_jax/core", "fla_jax/ops", "fla_jax/parallel", "fla_jax/checkpoints", "fla_jax/models"]
CODE += ["fla_jax/data", "tests"]
LENGTHS = {"pallas/DESIGN.md": 1500, "docs/performance.md": 600, "CONTRIBUTING.md": 900, "CHANGELOG.md": 400}
PAGES = sorted(
    str(path.relative_to(blocks.ROOT))
    for path in (
        *blocks.ROOT.glob("*.md"),
        *blocks.ROOT.glob("docs/**/*.md"),
        blocks.ROOT / "pallas" / "DESIGN.md",
    )
)


def found(text: str, words: dict[str, str]) -> list[str]:
    """The old words in a text, with their lines and what to write."""
    said = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in words.items():
            if match := re.search(rf"(?<![\w/])(?:{pattern})(?!\w)", line, re.IGNORECASE):
                said.append(f"line {number}: {match[0]!r}, write {better}")
    return said


def prose(text: str) -> str:
    """A page without its code; lines keep their numbers."""
    blank = lambda match: "\n" * match[0].count("\n")
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", blank, text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_the_words_of_the_field(page):
    text = (blocks.ROOT / page).read_text()
    assert not found(text, OLD_WORDS) + found(prose(text), OLD_WORDS_OF_PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_it_plainly(page):
    assert not found(prose((blocks.ROOT / page).read_text()), BANNED)


@pytest.mark.parametrize("folder", CODE)
def test_code_uses_the_words_of_the_field(folder):
    files = [path for path in sorted((blocks.ROOT / folder).rglob("*.py")) if path.name != "test_words.py"]
    wrong = {str(path.relative_to(blocks.ROOT)): found(path.read_text(), OLD_WORDS) for path in files}
    assert not {name: said for name, said in wrong.items() if said}


@pytest.mark.parametrize("folder", [*CODE[:-1], "fla_jax/layers", "benchmarks"])
def test_docstrings_begin_with_their_subject(folder):
    """A noun or a verb, not what the name before it leaves open."""
    begins = re.compile(r'"""(?:What|Of|Those|It) .*')
    found = {path.name: begins.findall(path.read_text()) for path in (blocks.ROOT / folder).rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


def test_old_words_are_found():
    text = "a stretch\n```python\nrows = 1\n```\nrows of `rows`, takes_rows\n"
    assert [line.partition(", write")[0] for line in found(text, OLD_WORDS)] == [
        "line 1: 'stretch'",
        "line 5: 'takes_rows'",
    ]
    assert [line.partition(":")[0] for line in found(prose(text), OLD_WORDS_OF_PAGES)] == ["line 5"]
    assert len(found("chosen by themselves\nThe tensor lies there.\nVery fast", BANNED)) == 3
    assert not found("growth, sidewalks, a launched program, mushrooms", OLD_WORDS)


@pytest.mark.parametrize("page", LENGTHS)
def test_pages_stay_within_their_lengths(page):
    words = len((blocks.ROOT / page).read_text().split())
    assert words <= LENGTHS[page], f"{page} has {words} words"


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    """Files and folders of the repository that a page names; NAME stands for any."""
    folders = "tests|docs|benchmarks|pallas|fla_jax|examples"
    named = re.findall(rf"(?<![\w/.:-])(?:{folders})/[\w/.*]*[\w*]", (blocks.ROOT / page).read_text())
    missing = [path for path in named if "NAME" not in path and not list(blocks.ROOT.glob(path))]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_pictures_exist(page):
    """In the repository, apart from charts of measurements, which the site makes."""
    path = blocks.ROOT / page
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    assert not [name for name in shown if not (path.parent / name).exists() and page != "docs/performance.md"]
    assert "{{" not in prose(path.read_text())
