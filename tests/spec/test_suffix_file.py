"""Suffix stores survive in a file, tenant by tenant; what is damaged or somebody else's is refused as a whole."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from verdraft.spec.suffix import SharedSuffixStore, SuffixStores
from verdraft.spec.suffix_file import FORMAT, SuffixFileError, pack_stores, read_stores, write_whole
from verdraft.spec.suffix_index import ending

VOCAB = 1000
PROMPT, ANSWER = list(range(100, 160)), list(range(300, 340))


def filled() -> SuffixStores:
    stores = SuffixStores(32 * 200)
    stores.of("").add(PROMPT, ANSWER)
    stores.of("a salt").add(PROMPT[:5], ANSWER[::-1])
    stores.of("").add([], ANSWER[:3])
    return stores


def kept(path: Path) -> Path:
    write_whole(pack_stores(filled(), "mine"), path / "answers")
    return path / "answers"


def test_what_was_kept_is_proposed_again_and_to_its_tenant_only(tmp_path: Path) -> None:
    stores = SuffixStores(32 * 200)
    read_stores(kept(tmp_path), "mine", VOCAB, stores)
    stores.check_integrity()
    assert stores.of("").propose(ending(PROMPT), 8).tokens == tuple(ANSWER[:8])
    assert stores.of("").propose(ending(PROMPT[:-1]), 8).tokens == ()
    assert stores.of("a salt").propose(ending([*PROMPT[:5], 339]), 4).tokens == tuple(ANSWER[-2:-6:-1])
    assert stores.of("a salt").propose(ending(ANSWER[:4]), 4).tokens == ()
    assert stores.of("another").num_tokens == 0
    assert pack_stores(stores, "mine") != pack_stores(SuffixStores(100), "mine")


def test_the_file_is_its_owner_s_and_holds_no_salt(tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"a salt" not in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=30))
def test_only_whole_sequences_are_kept_and_no_more_than_fit(sizes: list[tuple[int, int]]) -> None:
    store, again = SharedSuffixStore(150), SharedSuffixStore(150)
    for i, (tail, output) in enumerate(sizes):
        store.add([i] * tail, [100 + i] * output)
        store.check_integrity()
    stored = store.stored()
    assert len(stored.tokens) + len(stored.lengths) <= 150
    values = (
        [i for i, (_, output) in enumerate(sizes) if output][len(stored.lengths) * -1 :] if len(stored.lengths) else []
    )
    expected = [[i] * min(32, sizes[i][0]) + [100 + i] * sizes[i][1] for i in values]
    assert stored.tokens.tolist() == [token for tokens in expected for token in tokens]
    for i in values:
        again.add([i] * sizes[i][0], [100 + i] * sizes[i][1])
    assert np.array_equal(again.stored().tokens, stored.tokens)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "missing"])
def test_a_damaged_file_adds_nothing(tmp_path: Path, damage: str) -> None:
    path = kept(tmp_path)
    contents = path.read_bytes()
    flipped = contents[:-20] + bytes([contents[-20] ^ 1]) + contents[-19:]
    path.write_bytes({"cut": contents[:-9], "flipped": flipped, "empty": b"", "text": b"not this"}.get(damage, b""))
    if damage == "missing":
        path.unlink()
    stores = SuffixStores(1000)
    with pytest.raises(SuffixFileError):
        read_stores(path, "mine", VOCAB, stores)
    assert stores.num_tokens == 0


def test_a_file_of_another_model_version_or_vocabulary_is_refused(tmp_path: Path) -> None:
    path, stores = kept(tmp_path), SuffixStores(1000)
    with pytest.raises(SuffixFileError, match="another model or tokenizer"):
        read_stores(path, "yours", VOCAB, stores)
    with pytest.raises(SuffixFileError, match="damaged"):
        read_stores(path, "mine", 339, stores)
    save_file(load_file(path), path, {"format": str(FORMAT + 1)})
    with pytest.raises(SuffixFileError, match="another version"):
        read_stores(path, "mine", VOCAB, stores)
    assert stores.num_tokens == 0


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = kept(tmp_path)
    before = path.read_bytes()
    (tmp_path / "answers.partial").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(b"new", path)
    assert path.read_bytes() == before
