"""Where converted models live on disk, and how a folder gets there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from verdraft.model.errors import ModelError


def models_dir() -> Path:
    """$XDG_CACHE_HOME/verdraft/models, with ~/.cache as the default base."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "verdraft" / "models"


def cached_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, built first if it does not exist: `build` fills a temporary folder that is then renamed.

    Safe when several processes start at once: the first rename wins and the others' work is dropped.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            folder = Path(scratch) / target.name
            folder.mkdir()
            build(folder)
            _publish(folder, target)
    except OSError as error:
        raise ModelError(f"cannot write the model cache {target}: {error.strerror or error}") from error
    return target


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(folder)
