"""`verdraft train suffix`: recorded answers become a file that `--suffix-cache` starts with."""

import argparse

from verdraft.bench.traces import TraceReader
from verdraft.model.config import read_config
from verdraft.model.source import resolve_model
from verdraft.scheduler.config import SUFFIX_STORE_TOKENS
from verdraft.server.build import build_text
from verdraft.server.build_suffix import model_key
from verdraft.server.settings import SettingsError
from verdraft.server.train_predictor import coder_of
from verdraft.spec.suffix import SuffixStores
from verdraft.spec.suffix_file import pack_stores, write_whole


def run(arguments: argparse.Namespace) -> None:
    """Write the file. Raises DataError, ModelError and SettingsError."""
    path = resolve_model(arguments.model)
    text = build_text(path, read_config(path).eos_token_ids)
    reader = TraceReader(arguments.data, coder_of(text), arguments.longest, arguments.without)
    stores, answers = SuffixStores(SUFFIX_STORE_TOKENS), 0
    for file in reader.files:
        for answer in reader.read(file):
            stores.of("").add(answer.prompt, answer.output)
            answers += 1
    try:
        write_whole(pack_stores(stores, model_key(path)), arguments.out)
    except OSError as error:
        raise SettingsError(f"--out: cannot write {arguments.out}: {error.strerror or error}") from error
    print(f"{answers} answers, {stores.num_tokens} tokens kept")
