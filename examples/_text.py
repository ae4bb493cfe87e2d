"""The text that ``train_lm.py`` learns."""

from __future__ import annotations

import os
from pathlib import Path

from _cli import about


def python_reference() -> bytes:
    """The topics of Python's ``help()``.

    Some repeat sections of others; a paragraph is kept once, or training would see much of the held-out text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if len(paragraph) <= 80 or paragraph not in seen:
            kept.append(paragraph)
            seen.add(paragraph)
    return "\n\n".join(kept).encode()


def read_text(path: Path | None) -> bytes:
    """The bytes of ``--data``, a file or all text files below a directory; by default Python's reference."""
    if path is None:
        return python_reference()
    if not path.exists():
        raise ValueError(f"--data: there is no {path}")
    files, texts = text_files(path) if path.is_dir() else [path], []
    for file in files:
        with about(f"--data: {file}", "read"):
            text = file.read_bytes()
        if text and (b"\0" not in text or len(files) == 1):
            texts.append(text)
    if not texts:
        raise ValueError(f"--data: {path} holds no text")
    return b"\n\n".join(texts)


def text_files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones. A folder that cannot be read is an error, not fewer files."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise ValueError(f"--data: {error.filename} cannot be read: {error.strerror}") from error

    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())
