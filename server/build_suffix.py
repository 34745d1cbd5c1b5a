"""From settings to what keeps suffix stores over restarts."""

import hashlib
from pathlib import Path

from verdraft.model.weights import fingerprint
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.keeping import SuffixKeeper
from verdraft.server.settings import Settings, SettingsError


def keepers(engine: Engine, vocab_size: int, settings: Settings, model: Path) -> tuple[SuffixKeeper, ...]:
    """The thread that keeps the engine's stores, which are filled from its file; none when nobody asked for it.
    Raises SettingsError."""
    if settings.suffix_cache is None:
        return ()
    file = settings.suffix_cache.resolve()  # what a link names is written, not the link
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        raise SettingsError(f"--suffix-cache: expected a file in a folder that exists, got {str(file)!r}")
    keeper = SuffixKeeper(engine.drafting.stores, file, model_key(model))
    keeper.read(vocab_size)
    return (keeper,)


def model_key(model: Path) -> str:
    """A name for the weights and the tokenizer in a folder. Raises ModelError."""
    tokenizer = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    return f"{fingerprint(model)} {tokenizer}"
