"""Keeps the shared suffix stores in a file: now and then while serving, and at the end."""

import hashlib
import logging
import threading
from pathlib import Path

from verdraft.spec.suffix import SuffixStores
from verdraft.spec.suffix_file import SuffixFileError, pack_stores, read_stores, write_whole

logger = logging.getLogger("verdraft.suffix")

SAVE_SECONDS = 300.0


class SuffixKeeper:
    """A thread that writes `stores` to `file` when they have changed."""

    def __init__(self, stores: SuffixStores, file: Path, model: str) -> None:
        """`model` names weights and tokenizer that the ids belong to."""
        self._stores, self._file, self._model = stores, file, model
        self._written = b""  # a digest of it
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verdraft-suffix-keeper", daemon=True)

    def read(self, vocab_size: int) -> None:
        """Fill the stores from the file; before start(). One that does not fit is moved aside, not written over."""
        if not self._file.exists():
            return
        try:
            read_stores(self._file, self._model, vocab_size, self._stores)
        except SuffixFileError as error:
            aside = self._file.with_name(self._file.name + ".unread")
            logger.warning("%s; starting without it, and moving it to %s", error, aside)
            self._file.replace(aside)
        else:
            logger.info("%d tokens of finished answers from %s", self._stores.num_tokens, self._file)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and write a last time; the engine's thread has ended."""
        self._closing.set()
        self._thread.join()
        self.write()

    def _run(self) -> None:
        while not self._closing.wait(SAVE_SECONDS):
            self.write()

    def write(self) -> None:
        """Write the file if there is anything new. What fails is logged: serving goes on."""
        contents = pack_stores(self._stores, self._model)
        digest = hashlib.sha256(contents).digest()
        if digest == self._written:
            return
        try:
            write_whole(contents, self._file)
        except OSError as error:
            logger.warning("finished answers cannot be kept in %s: %s", self._file, error.strerror or error)
        else:
            self._written = digest
