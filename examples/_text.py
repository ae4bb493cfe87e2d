"""Text that the examples learn."""

from __future__ import annotations

import os
from pathlib import Path

from _cli import about


def python_topics() -> list[str]:
    """The topics of Python's ``help()``, without long paragraphs that an earlier one has: training would
    otherwise see much of the held-out text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = []
    for name in sorted(topics):
        paragraphs = dict.fromkeys(text.strip("\n") for text in topics[name].split("\n\n"))
        texts.append("\n\n".join(text for text in paragraphs if len(text) <= 80 or text not in seen))
        seen.update(paragraphs)
    return texts


def read_text(path: Path | None) -> bytes:
    """The bytes of ``--data``, a file or all text files below a folder; by default Python's topics."""
    if path is None:
        return "\n\n".join(python_topics()).encode()
    texts = []
    for file in text_files("--data", path):
        with about(f"--data: {file}", "read"):
            texts.append(file.read_bytes())
    return b"\n\n".join(filter(None, texts))


def text_files(flag: str, path: Path) -> list[Path]:
    """A file, or all files below a folder but hidden ones and those with NUL bytes.

    A folder that cannot be read is an error, not fewer files.
    """
    if not path.exists():
        raise ValueError(f"{flag}: there is no {path}")
    if not path.is_dir():
        return [path]
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise ValueError(f"{flag}: {error.filename} cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    texts = []
    for file in sorted(filter(Path.is_file, found)):
        with about(f"{flag}: {file}", "read"), open(file, "rb") as opened:
            if (start := opened.read(1 << 16)) and b"\0" not in start:
                texts.append(file)
    if not texts:
        raise ValueError(f"{flag}: {path} contains no text")
    return texts
