"""Tokenizers: bytes always, the World vocabulary and tokenizer.json where their packages are installed, clear errors where not."""

from __future__ import annotations

import json
import sys

import pytest

from fla_jax.tokenizer import WORLD_VOCABULARY, decode_stream, load_tokenizer, uncounted

TEXT = "Hello, Wörld 世界 🙂!\n 12"


@pytest.fixture(params=["bytes", WORLD_VOCABULARY, "tokenizer.json"])
def tokenizer(request, tmp_path):
    if request.param == WORLD_VOCABULARY:
        pytest.importorskip("rwkv.rwkv_tokenizer")
    if request.param != "tokenizer.json":
        return load_tokenizer(request.param)
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.train_from_iterator([TEXT], library.trainers.BpeTrainer(initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), vocab_size=260))
    made.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


def test_there_and_back(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert all(isinstance(token, int) for token in tokens) and tokenizer.decode(tokens) == TEXT


def test_streams_whole_characters(tokenizer):
    tokens = tokenizer.encode(TEXT)
    pieces = list(decode_stream(tokenizer, tokens))
    assert "".join(pieces) == TEXT and len(pieces) > 3 and not any("\ufffd" in piece or not piece for piece in pieces)


def test_bytes_that_are_no_text():
    tokenizer = load_tokenizer("bytes")
    broken = [72, 0xFF, 105, 0xE4, 0xB8]
    assert "".join(decode_stream(tokenizer, broken)) == tokenizer.decode(broken) == "H\ufffdi\ufffd"


def test_world_tokens_without_bytes():
    pytest.importorskip("rwkv.rwkv_tokenizer")
    tokenizer = load_tokenizer(vocab_size=65536)
    assert tokenizer.decode([0, 34, 65535]) == "!"


def test_uncounted():
    assert uncounted(load_tokenizer("bytes"), 256) == (9, 32, *range(48, 58))


def test_by_vocabulary():
    assert load_tokenizer(vocab_size=256).encode("é") == [0xC3, 0xA9]
    with pytest.raises(ValueError, match="name must be given: a vocabulary of 100"):
        load_tokenizer(vocab_size=100)


def test_missing(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        load_tokenizer("nowhere")
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    for name, package in ((WORLD_VOCABULARY, "rwkv"), (tmp_path / "tokenizer.json", "tokenizers")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"pip install {package}"):
            load_tokenizer(name)
