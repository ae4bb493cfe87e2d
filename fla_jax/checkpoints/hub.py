"""Checkpoints in repositories at Hugging Face, named like ``hf://owner/name``.

huggingface_hub downloads what is not in its cache yet; its variables (``HF_HOME``, ``HF_HUB_CACHE``,
``HF_HUB_OFFLINE``, ``HF_TOKEN``) mean what they mean everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from .files import HUB_PREFIX, as_path
from .tensors import printable, quoted

# The files of a model, in the top directory: repositories may have other formats in other directories.
_FILES = ["config.json", "model.safetensors.index.json", "*.safetensors"]
_PART = r"[\w.-]+"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@]+?))?(?:/(?P<file>[^@]+))?")


def located(path: object) -> Path:
    """The argument ``path`` as a path of this machine, fetched first where it names a repository.

    Raises:
        TypeError: it is no path. ValueError: it names no repository, or one without safetensors.
        OSError: the repository or its file is neither in the cache nor can be downloaded. ImportError:
            huggingface_hub is not installed.
    """
    if not (isinstance(path, str) and path.startswith(HUB_PREFIX)):
        return as_path(path)
    found = _NAME.fullmatch(path.removeprefix(HUB_PREFIX))
    if found is None:
        form = "hf://owner/name, with @revision and /file behind it if need be"
        raise ValueError(f"path must be {form}, got {quoted(path)}")
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError:
        what = "needs the package huggingface_hub: pip install 'fla-jax[hub]'"
        raise ImportError(f"{path} {what}") from None
    repo, revision, file = found["repo"], found["revision"], found["file"]
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=_FILES, ignore_patterns=["*/*"]
            )
        )
    except OSError as error:  # missing, forbidden, or no network and not in the cache
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(f"{path}: {printable(error)}") from error
    except EntryNotFoundError as error:  # the repository lacks the file
        raise FileNotFoundError(f"{path}: {printable(error)}") from error
    except ValueError as error:  # no name that a repository could have
        raise ValueError(f"{path}: {printable(error)}") from None
    if not any(folder.glob("*.safetensors")):
        what = "holds no safetensors; name one of its files, such as"
        raise ValueError(f"{path} {what} {HUB_PREFIX}{repo}/NAME.pth")
    return folder
