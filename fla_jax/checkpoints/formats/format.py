"""What a format of checkpoints is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..param_maps.param_map import ParamMap
from ..tensors import StoredTensor


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """One way to keep tensors, by name, in a file or a directory.

    Attributes:
        name: for messages, such as "a .pth file".
        reads: whether what lies at a path is to be read in this format; by its name and kind, `read` looks
            inside.
        writes: whether a path to save to asks for this format.
        read: gives the tensors by name, as the file has them; they are read one by one, later and in threads.
            Raises ValueError, with the path, where the file is broken.
        write: ``write(path, tensors, fields)`` writes arrays by name, whole or not at all; ``fields`` are
            what a ``config.json`` would say of the model. Raises OSError with the path.
        namings: those that it is written with, one for each family.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints import FORMATS, Format, stored
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL6, OFFICIAL7
        >>> is_npz = lambda path: path.suffix == ".npz"
        >>> read_npz = lambda path: {name: stored(name, x) for name, x in np.load(path).items()}
        >>> write_npz = lambda path, tensors, fields: np.savez(path, **tensors)
        >>> npz = Format("an .npz file", is_npz, is_npz, read_npz, write_npz, (OFFICIAL6, OFFICIAL7))
        >>> FORMATS.append(npz)  # from here on load_checkpoint and save_checkpoint know .npz files
        >>> FORMATS.remove(npz)
    """

    name: str
    reads: Callable[[Path], bool]
    writes: Callable[[Path], bool]
    read: Callable[[Path], Mapping[str, StoredTensor]]
    write: Callable[[Path, Mapping[str, np.ndarray], Mapping[str, Any]], None]
    param_maps: tuple[ParamMap, ...]
