"""The record of a checkpoint format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from ..files import Json
from ..tensors import StoredTensor


def no_fields(path: Path) -> dict[str, Json]:
    """`Format.fields` of a format with tensors alone."""
    return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """A way to store tensors, by name, in a file or a directory.

    Attributes:
        name: for messages, such as "a .pth file".
        reads: whether a path is read in this format, by its name and kind only.
        writes: whether a path is written in this format.
        read: returns the tensors by their names in the file; they are read one by one, later and in threads.
            Raises ValueError, with the path, where the file is broken.
        write: ``write(path, tensors, config_json)`` writes arrays by name, completely or not at all;
            ``config_json`` has the contents of a ``config.json``. Raises OSError with the path.
        scheme: the scheme of names that it is written with, see `ParamMap`.
        fields: configuration fields that files beside the tensors give, and that no tensor shows. Raises
            ValueError, with the path, where they describe a model that the library has not.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints import FORMATS, Format, stored
        >>> is_npz = lambda path: path.suffix == ".npz"
        >>> read_npz = lambda path: {name: stored(name, x) for name, x in np.load(path).items()}
        >>> write_npz = lambda path, tensors, config_json: np.savez(path, **tensors)
        >>> npz = Format("an .npz file", is_npz, is_npz, read_npz, write_npz, "official")
        >>> FORMATS.append(npz)  # load_checkpoint and save_checkpoint now take .npz files
        >>> FORMATS.remove(npz)
    """

    name: str
    reads: Callable[[Path], bool]
    writes: Callable[[Path], bool]
    read: Callable[[Path], Mapping[str, StoredTensor]]
    write: Callable[..., None]
    scheme: str
    fields: Callable[[Path], dict[str, Json]] = no_fields
