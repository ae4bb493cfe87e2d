"""Text to tokens and back, with the packages that RWKV users have; none of them is needed to import this."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..checkpoints.files import Json, load_json
from ..checkpoints.native import is_native, tokenizer_of
from ..core.arguments import check_integer, shown

_ENDS = ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "<|end_of_text|>")  # of common vocabularies
WORLD_VOCABULARY = "rwkv_vocab_v20230424"
_WORLD_SIZE = 65536  # of the models; 65530 to 65535 have no bytes, and 0 ends a document


class Tokenizer(Protocol):
    """What the functions here return and take. An attribute ``end_of_text``, if there is one, is a token that
    ends a completion, or None.

    Example:
        >>> from fla_jax.generation import load_tokenizer
        >>> tokenizer = load_tokenizer("bytes")
        >>> tokenizer.decode(tokenizer.encode("anything with these two methods"))
        'anything with these two methods'
    """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; U+FFFD or nothing for unknown ones and for bytes that are not UTF-8."""
        ...


class _Bytes:
    """A token is a byte: models with a vocabulary of 256."""

    end_of_text = 0  # as documents end in `fla_jax.data` and answers in fine-tuning

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")


class _World:
    """The vocabulary of the official RWKV World models, from the ``rwkv`` package."""

    end_of_text = 0

    def __init__(self) -> None:
        try:
            from rwkv import rwkv_tokenizer
        except ImportError as error:
            raise ImportError(
                f"the tokenizer {WORLD_VOCABULARY} comes with the package rwkv: pip install rwkv"
            ) from error
        path = Path(rwkv_tokenizer.__file__).with_name(f"{WORLD_VOCABULARY}.txt")
        self._trie = rwkv_tokenizer.TRIE_TOKENIZER(str(path))

    def encode(self, text: str) -> list[int]:
        return self._trie.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        # not the package's decode, which gives one U+FFFD for a whole text with half a character in it, and
        # fails at tokens without bytes
        return b"".join(self._trie.idx2token.get(int(token), b"") for token in tokens).decode(
            errors="replace"
        )


class _HuggingFace:
    """A ``tokenizer.json``, read by the ``tokenizers`` package."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as FromFile
        except ImportError as error:
            raise ImportError(f"{path} is read by the package tokenizers: pip install tokenizers") from error
        try:
            self._tokenizer = FromFile.from_file(str(path))
        except Exception as error:  # the package raises nothing more precise
            raise ValueError(
                f"{path} is no tokenizer.json that the package tokenizers reads: {error}"
            ) from None
        names = (tokenizer_config(path.parent).get("eos_token"), *_ENDS)
        ends = (self._tokenizer.token_to_id(name) for name in names if isinstance(name, str))
        self.end_of_text = next((token for token in ends if token is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_tokenizer(name: str | os.PathLike[str] | None = None, *, vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer by name, or the one that a model's vocabulary calls for.

    Args:
        name: ``"bytes"``, of which 0 ends a text; ``"rwkv_vocab_v20230424"``, the vocabulary of the World
            models (PyPI ``rwkv``; PyTorch is not needed for it); the path of a ``tokenizer.json`` (PyPI
            ``tokenizers``), such as the Pile models' ``20B_tokenizer.json``; or the folder of a checkpoint
            that was saved with one.
        vocab_size: of the model, used without ``name``: 256 means bytes, 65529 to 65536 the World vocabulary.

    Returns:
        A `Tokenizer`.

    Raises:
        ImportError: the package that reads it is missing; the message says which.
        ValueError: neither ``name`` nor ``vocab_size`` says which tokenizer, one of them has a wrong type, or
            the file is no ``tokenizer.json``; the message names the argument or the file.
        FileNotFoundError: there is no such file.

    Example:
        >>> from fla_jax.generation import load_tokenizer
        >>> load_tokenizer("bytes").encode("Hi")
        [72, 105]
    """
    if vocab_size is not None:
        vocab_size = check_integer("vocab_size", vocab_size, 1)
    if name is None:
        if vocab_size == 256:
            return _Bytes()
        if vocab_size is not None and _WORLD_SIZE - 7 <= vocab_size <= _WORLD_SIZE:
            return _World()
        raise ValueError(
            f"name must be given: a vocabulary of {vocab_size} tokens does not say which tokenizer made them "
            "(256: bytes, 65536: RWKV World)"
        )
    if name == "bytes":
        return _Bytes()
    if name == WORLD_VOCABULARY:
        return _World()
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"name must be a name or a path, got {shown(name)}")
    path = Path(name).expanduser()
    if is_native(path):
        if (name := tokenizer_of(path)) is None:
            raise ValueError(f"{path} was saved without a tokenizer: pass its name or path")
        return load_tokenizer(name, vocab_size=vocab_size)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"name must be 'bytes', {WORLD_VOCABULARY!r} or the path of a tokenizer.json; "
            f"there is no file {path}"
        )
    return _HuggingFace(path)


def checkpoint_tokenizer(
    checkpoint: str | os.PathLike[str], name: str | os.PathLike[str] | None = None, *, vocab_size: int
) -> Tokenizer:
    """The tokenizer of a checkpoint: the one in its folder, or the one that its vocabulary calls for.

    Args:
        checkpoint: a folder, or a file, which has no tokenizer.
        name: of another tokenizer to take; see `load_tokenizer`.
        vocab_size: of the model.

    Raises:
        ImportError, ValueError, FileNotFoundError: see `load_tokenizer`.

    Example:
        >>> from fla_jax.generation import checkpoint_tokenizer
        >>> checkpoint_tokenizer("model.pth", vocab_size=256).encode("Hi")
        [72, 105]
    """
    folder = Path(checkpoint)
    if name is None and is_native(folder):
        name = tokenizer_of(folder)
    elif name is None and (folder / "tokenizer.json").is_file():
        name = folder
    return load_tokenizer(name, vocab_size=vocab_size)


def tokenizer_config(folder: Path) -> dict[str, Json]:
    """tokenizer_config.json in the folder of a checkpoint; {} if there is none.

    A special token that is a dict in the file is its text here.

    Raises:
        ValueError: the file contains no JSON object.
    """
    path = folder / "tokenizer_config.json"
    found = load_json(path) if path.is_file() else {}
    is_token = lambda x: isinstance(x, dict) and isinstance(x.get("content"), str)
    return {name: x["content"] if is_token(x) else x for name, x in found.items()}


def uncounted(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Tokens that PIPELINE's frequency penalty does not count, for `SamplingParams.uncounted`.

    They are those below ``vocab_size`` whose text is a part of ``" \\t0123456789"``.

    Example:
        >>> from fla_jax.generation import SamplingParams, load_tokenizer, uncounted
        >>> sampling = SamplingParams(uncounted=uncounted(load_tokenizer("bytes"), 256))
        >>> "".join(map(chr, sampling.uncounted))
        '\\t 0123456789'
    """
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    return tuple(token for token in range(vocab_size) if tokenizer.decode([token]) in " \t0123456789")
