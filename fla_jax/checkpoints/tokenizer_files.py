"""The files of a tokenizer, copied beside a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .files import check_regular, replacing

# tokenizer.json and *_config.json, special_tokens_map.json, tokenization_*.py, rwkv_vocab_*.txt, ...
_PATTERNS = ("*token*", "*vocab*", "merges.txt", "chat_template*")


class TokenizerFiles(NamedTuple):
    """A tokenizer to save.

    Attributes:
        name: to load it by: of a file, or one that `fla_jax.generation.load_tokenizer` knows; None if there
            is no tokenizer, or a folder without ``tokenizer.json``.
        files: to copy.
    """

    name: str | None = None
    files: Iterable[Path] = ()

    def copy(self, folder: Path) -> None:
        """Copies the files into ``folder``."""
        for file in self.files:
            with replacing(folder / file.name) as copy:
                copy.write(file.read_bytes())


def find_tokenizer(tokenizer: str | os.PathLike[str] | None, *, names: bool) -> TokenizerFiles:
    """The argument ``tokenizer``: a file, a folder with files of a tokenizer, or, with ``names``, a name.

    Raises:
        ValueError: there is no such file, or none of a tokenizer in the folder.
    """
    if tokenizer is None:
        return TokenizerFiles()
    path = Path(tokenizer)
    if path.is_dir():
        found = sorted({file for pattern in _PATTERNS for file in path.glob(pattern) if file.is_file()})
        if found:
            whole = path / "tokenizer.json"
            return TokenizerFiles(whole.name if whole in found else None, found)
    elif path.exists():
        check_regular(path)
        return TokenizerFiles(path.name, [path])
    elif names and path.name == tokenizer and not path.suffix:
        return TokenizerFiles(tokenizer)
    kinds = "a file, or a folder with files of a tokenizer" + (", or a name" if names else "")
    raise ValueError(f"tokenizer must be {kinds}, got {os.fspath(tokenizer)!r}")
