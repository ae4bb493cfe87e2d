"""Text to tokens and back, with the packages that RWKV users have; none of them is needed to import this."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

WORLD_VOCABULARY = "rwkv_vocab_v20230424"
_WORLD_SIZE = 65536  # of the models; 65530 to 65535 have no bytes, and 0 ends a document


class Tokenizer(Protocol):
    """What the functions here return and take."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. Bytes that are not UTF-8 (half a character, say) and unknown tokens become U+FFFD or nothing."""
        ...


class _Bytes:
    """A token is a byte: models with a vocabulary of 256."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")


class _World:
    """The vocabulary of the official RWKV World models, from the ``rwkv`` package."""

    def __init__(self) -> None:
        try:
            from rwkv import rwkv_tokenizer
        except ImportError as error:
            raise ImportError(f"the tokenizer {WORLD_VOCABULARY} comes with the package rwkv: pip install rwkv") from error
        path = Path(rwkv_tokenizer.__file__).with_name(f"{WORLD_VOCABULARY}.txt")
        self._trie = rwkv_tokenizer.TRIE_TOKENIZER(str(path))

    def encode(self, text: str) -> list[int]:
        return self._trie.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        # not the package's decode, which gives one U+FFFD for a whole text with half a character in it, and fails at tokens without bytes
        return b"".join(self._trie.idx2token.get(int(token), b"") for token in tokens).decode(errors="replace")


class _HuggingFace:
    """A ``tokenizer.json``, read by the ``tokenizers`` package."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as FromFile
        except ImportError as error:
            raise ImportError(f"{path} is read by the package tokenizers: pip install tokenizers") from error
        self._tokenizer = FromFile.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_tokenizer(name: str | os.PathLike[str] | None = None, *, vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer by name, or the one that a model's vocabulary calls for.

    Args:
        name: ``"bytes"``; ``"rwkv_vocab_v20230424"``, the vocabulary of the World models (PyPI ``rwkv``; PyTorch is not needed for it); or the path of a
            ``tokenizer.json`` (PyPI ``tokenizers``), such as the Pile models' ``20B_tokenizer.json``.
        vocab_size: of the model, used without ``name``: 256 means bytes, 65529 to 65536 the World vocabulary.

    Returns:
        A `Tokenizer`.

    Raises:
        ImportError: the package that reads it is missing; the message says which.
        ValueError: neither ``name`` nor ``vocab_size`` says which tokenizer.
        FileNotFoundError: there is no such file.

    Example:
        >>> from fla_jax.tokenizer import load_tokenizer
        >>> load_tokenizer("bytes").encode("Hi")
        [72, 105]
    """
    if name is None:
        if vocab_size == 256:
            return _Bytes()
        if vocab_size is not None and _WORLD_SIZE - 7 <= vocab_size <= _WORLD_SIZE:
            return _World()
        raise ValueError(f"name must be given: a vocabulary of {vocab_size} tokens does not say which tokenizer made them (256: bytes, 65536: RWKV World)")
    if name == "bytes":
        return _Bytes()
    if name == WORLD_VOCABULARY:
        return _World()
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"name must be 'bytes', {WORLD_VOCABULARY!r} or the path of a tokenizer.json; there is no file {path}")
    return _HuggingFace(path)


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterable[str]:
    """Text as its tokens come: pieces whose concatenation is the text of all tokens. A character of several tokens comes whole.

    Args:
        tokenizer: from `load_tokenizer`.
        tokens: one after the other, such as ``int(t[0]) for t in fla_jax.generate.stream(...)``.

    Yields:
        A non-empty piece of text.
    """
    held: list[int] = []
    shown = 0
    text = ""
    for token in tokens:
        held.append(token)
        text = tokenizer.decode(held)
        ready = len(text.rstrip("\ufffd"))  # the end may be the beginning of a character
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]


def uncounted(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Tokens that PIPELINE's frequency penalty does not count: those whose text is a part of ``" \\t0123456789"``; for `Sampling.uncounted`."""
    return tuple(token for token in range(vocab_size) if tokenizer.decode([token]) in " \t0123456789")
