"""Tokenizers: bytes, and where their packages are installed the World vocabulary and tokenizer.json."""

from __future__ import annotations

import functools
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.generation import decode_stream
from fla_jax.generation.text import TextDecoder
from fla_jax.generation.tokenizer import WORLD_VOCABULARY, load_tokenizer, uncounted

TEXT = "Hello, Wörld 世界 🙂!\n 12"


@functools.cache
def world():
    """Reading it takes seconds."""
    pytest.importorskip("rwkv.rwkv_tokenizer")
    return load_tokenizer(vocab_size=65536)


@pytest.fixture(params=["bytes", WORLD_VOCABULARY, "tokenizer.json"])
def tokenizer(request, tmp_path):
    if request.param == WORLD_VOCABULARY:
        return world()
    if request.param == "bytes":
        return load_tokenizer("bytes")
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.train_from_iterator(
        [TEXT],
        library.trainers.BpeTrainer(
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), vocab_size=260
        ),
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


def test_there_and_back(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert all(isinstance(token, int) for token in tokens) and tokenizer.decode(tokens) == TEXT


def test_streams_whole_characters(tokenizer):
    tokens = tokenizer.encode(TEXT)
    parts = list(decode_stream(tokenizer, tokens))
    assert (
        "".join(parts) == TEXT and len(parts) > 3 and not any("\ufffd" in part or not part for part in parts)
    )


def streamed(tokenizer, tokens):
    """What `decode_stream` is to give, from the texts of all beginnings: quadratic, and plain."""
    shown, text = 0, ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        ready = len(text.rstrip("\ufffd"))
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]


def test_streams_what_the_beginnings_say(tokenizer):
    """Any tokens; characters of one to four bytes, some lost; one byte again and again; U+FFFD."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        text = tokenizer.encode("".join(rng.choice(list("a\n é世🙂\ufffd\u0300"), 150)))
        for tokens in (
            rng.integers(0, 256, 200),
            np.array(text)[rng.random(len(text)) > 0.1],
            np.repeat(tokenizer.encode("世")[:1], 70),
            np.concatenate([rng.integers(0, 256, 5), np.repeat(rng.integers(0, 256), 40), text[:20]]),
        ):
            tokens = [int(token) for token in tokens]
            parts = list(decode_stream(tokenizer, iter(tokens)))
            assert parts == list(streamed(tokenizer, tokens)) and "".join(parts) == tokenizer.decode(tokens)


class Counting:
    """A tokenizer, and how many tokens it was given to decode."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        return self.tokenizer.decode(tokens)


def test_streaming_is_linear(tokenizer):
    """Of text, any tokens and bytes that are no text, each is decoded a few times, however many come."""
    any_tokens = np.random.default_rng(0).integers(0, 256, 3000)
    for tokens in (tokenizer.encode(TEXT) * 100, any_tokens, [0xE4] * 3000):
        counting = Counting(tokenizer)
        list(decode_stream(counting, [int(token) for token in tokens]))
        assert counting.decoded <= 20 * len(tokens)


class Words:
    """Decodes as many vocabularies do: a space before every word but a text's first; 0 is no text."""

    def decode(self, tokens):
        return "".join(["", " a", " b", " ", "s"][token] for token in tokens).removeprefix(" ")


def test_the_text_of_a_token_may_depend_on_those_before():
    for seed in range(6):
        tokens = np.random.default_rng(seed).integers(0, 5, 80).tolist()
        assert list(decode_stream(Words(), tokens)) == list(streamed(Words(), tokens))
    counting = Counting(Words())
    assert "".join(decode_stream(counting, [1, *[0] * 3000, 1, 3, 1, 4])) == "a a  as"
    assert counting.decoded <= 20 * 3000


@pytest.mark.parametrize("words", [False, True])
def test_tokens_together_give_the_text_of_tokens_one_by_one(tokenizer, words):
    """After any number of tokens the pieces are all the text that is ready, in whatever groups they came."""
    tokenizer = Words() if words else tokenizer
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, 5 if words else 256, 150).tolist()
        if seed % 2 and not words:
            tokens = [token for token in tokenizer.encode(TEXT * 3) if rng.random() > 0.1]
        decoder, said, end = TextDecoder(tokenizer), "", 0
        while end < len(tokens):
            start, end = end, end + int(rng.integers(0, 20))
            said += decoder.push(tokens[start:end])
            text = tokenizer.decode(tokens[:end])
            assert said == text[: len(text.rstrip("\ufffd"))]
        assert said + decoder.finish() == tokenizer.decode(tokens)


def test_bytes_that_are_no_text():
    tokenizer = load_tokenizer("bytes")
    broken = [72, 0xFF, 105, 0xE4, 0xB8]
    assert "".join(decode_stream(tokenizer, broken)) == tokenizer.decode(broken) == "H\ufffdi\ufffd"


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_tokens_of_any_kind(array):
    tokenizer = load_tokenizer("bytes")
    assert list(decode_stream(tokenizer, array([*"né!".encode()]))) == ["n", "é", "!"]
    for wrong, shown in (([array([72, 1])], r".*\[72,? +1\].*"), ("text", "'t'"), ([7.0], "7.0")):
        with pytest.raises(TypeError, match=f"tokens must be integers, got {shown}"):
            list(decode_stream(tokenizer, wrong))


def test_world_tokens_without_bytes():
    assert world().decode([0, 34, 65535]) == "!"


def test_uncounted():
    assert uncounted(load_tokenizer("bytes"), 256) == (9, 32, *range(48, 58))


def test_by_vocabulary():
    assert load_tokenizer(vocab_size=256).encode("é") == [0xC3, 0xA9]
    with pytest.raises(ValueError, match="name must be given: a vocabulary of 100"):
        load_tokenizer(vocab_size=100)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"model": 1}', b"\xff\x00"])
def test_a_broken_file(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    message = "tokenizer.json is no tokenizer.json that the package tokenizers reads: ."
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": 5}, "name must be a name or a path, got 5"),
        ({"vocab_size": True}, "vocab_size must be an integer >= 1, got True"),
        ({"vocab_size": "256"}, "vocab_size must be an integer >= 1, got '256'"),
        ({"vocab_size": 256.0}, "vocab_size must be an integer >= 1, got 256.0"),
        ({"name": "bytes", "vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(**arguments)


def test_missing(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        load_tokenizer("nowhere")
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    for name, package in ((WORLD_VOCABULARY, "rwkv"), (tmp_path / "tokenizer.json", "tokenizers")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"pip install {package}"):
            load_tokenizer(name)
