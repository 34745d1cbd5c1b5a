"""Text assembly against a definition that looks at the whole text at once."""

from hypothesis import given
from hypothesis import strategies as st

from verdraft.server.assembler import TextAssembler
from verdraft.server.stops import StopSet

SPECIAL = 256  # ids 0..255 are bytes, this one has none


def byte_of(token: int) -> bytes | None:
    return None if token == SPECIAL else bytes([token])


def whole_text(pieces: list[bytes], stops: tuple[str, ...], min_tokens: int = 0) -> tuple[str, int]:
    """The contract, read literally: (text, number of tokens). A token's text is what its bytes complete."""
    lengths = [len(_complete(b"".join(pieces[:count]))) for count in range(len(pieces) + 1)]
    text = _complete(b"".join(pieces))
    for count in range(1, len(pieces) + 1):
        ends = range(lengths[count - 1] + 1, lengths[count] + 1)
        starts = [end - len(stop) for end in ends for stop in stops if text[:end].endswith(stop)]
        if starts and count >= min_tokens:
            return text[: min(starts)], count
    return b"".join(pieces).decode("utf-8", errors="replace"), len(pieces)


def _complete(data: bytes) -> str:
    """The lossy decode without what a following byte could still complete."""
    for cut in range(min(3, len(data)) + 1):
        head, tail = data[: len(data) - cut], data[len(data) - cut :]
        if cut and not _starts_character(tail):
            continue
        if not any(_starts_character(data[len(data) - k :]) for k in range(cut + 1, min(3, len(data)) + 1)):
            return head.decode("utf-8", errors="replace")
    raise AssertionError


def _starts_character(data: bytes) -> bool:
    """Whether `data` is a proper prefix of one valid character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


texts = st.text(alphabet="ab\u00e9\U0001f600", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\u00e9\U0001f600\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)


def run(pieces: list[bytes], chunks: list[int], stops: tuple[str, ...], min_tokens: int) -> tuple[str, int, list[str]]:
    """Feed the pieces as tokens, in chunks of the given lengths: (text, tokens taken, what each call gave)."""
    engine = TextAssembler(pieces.__getitem__, StopSet(stops), min_tokens)
    count = next((i + 1 for i in range(len(pieces)) if engine.push(i)), len(pieces))
    assembler = TextAssembler(pieces.__getitem__, StopSet(stops), min_tokens)
    sent: list[str] = []
    start = 0
    while start < count:
        size = chunks[len(sent) % len(chunks)]
        sent.append(assembler.feed(range(start, min(start + size, count))))
        start += size
    sent.append(assembler.finish())
    assert assembler.stopped == engine.stopped
    return "".join(sent), count, sent


def cut_into_pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(texts, sizes, sizes, stop_lists, st.integers(0, 8))
def test_any_chunking_gives_the_contract_s_text(
    text: str, token_sizes: list[int], chunks: list[int], stops: tuple[str, ...], min_tokens: int
) -> None:
    pieces = cut_into_pieces(text.encode(), token_sizes)
    found, count, _ = run(pieces, chunks, stops, min_tokens)
    assert (found, count) == whole_text(pieces, stops, min_tokens)


@given(st.binary(max_size=40), sizes, sizes)
def test_random_bytes_become_their_lossy_decode(data: bytes, token_sizes: list[int], chunks: list[int]) -> None:
    found, _, sent = run(cut_into_pieces(data, token_sizes), chunks, (), 0)
    assert found == data.decode("utf-8", errors="replace") == "".join(sent)


@given(st.binary(max_size=30), sizes, stop_lists)
def test_random_bytes_with_stops(data: bytes, token_sizes: list[int], stops: tuple[str, ...]) -> None:
    pieces = cut_into_pieces(data, token_sizes)
    found, count, _ = run(pieces, [1], stops, 0)
    assert (found, count) == whole_text(pieces, stops)


@given(texts, stop_lists)
def test_holds_back_only_what_could_start_a_stop(text: str, stops: tuple[str, ...]) -> None:
    pieces = [char.encode() for char in text]
    assembler = TextAssembler(pieces.__getitem__, StopSet(stops))
    sent = ""
    for token in range(len(pieces)):
        sent += assembler.feed([token])
        if assembler.stopped:
            break
        seen = text[: token + 1]
        held = max((k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0)
        assert sent == seen[: len(seen) - held]
    assert text.startswith(sent)


def test_a_character_is_sent_when_it_is_complete_and_not_before() -> None:
    assembler = TextAssembler(byte_of, StopSet(()))
    assert [assembler.feed([byte]) for byte in "a\U0001f600b".encode()] == ["a", "", "", "", "\U0001f600", "b"]
    assert assembler.finish() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end() -> None:
    assembler = TextAssembler(byte_of, StopSet(()))
    assert assembler.feed("a\U0001f600".encode()[:-1]) == "a"
    assert assembler.finish() == "\ufffd"


def test_the_earliest_start_wins_whatever_the_order() -> None:
    for stops in (("lo", "hello w"), ("hello w", "lo")):
        assembler = TextAssembler([b"say hel", b"lo world"].__getitem__, StopSet(stops))
        assert assembler.feed([0]) == "say "
        assert assembler.feed([1]) == ""
        assert assembler.stopped
        assert assembler.finish() == ""


def test_tokens_after_the_stop_leave_no_trace() -> None:
    assembler = TextAssembler(byte_of, StopSet(("b",)))
    assert assembler.feed(b"abcb") == "a"
    assert assembler.feed(b"zz") == "" == assembler.finish()


def test_special_and_invisible_tokens_have_no_text_and_do_not_break_a_stop() -> None:
    assembler = TextAssembler(byte_of, StopSet(("bc",)), invisible=frozenset(b"x"))
    assert assembler.feed([*b"ab", SPECIAL, *b"xc"]) == "a"
    assert assembler.stopped


def test_stops_that_complete_before_min_tokens_are_text() -> None:
    assembler = TextAssembler(byte_of, StopSet(("aa",)), min_tokens=3)
    assert assembler.feed(b"aa") == "a"
    assert assembler.feed(b"a") == ""
    assert assembler.stopped
    assert assembler.finish() == ""


def test_the_end_releases_what_was_held() -> None:
    assembler = TextAssembler(byte_of, StopSet(("@@never@@",)))
    assert assembler.feed(b"x@@nev") == "x"
    assert assembler.finish() == "@@nev"


def test_sixteen_long_stops_hold_the_longest_tail() -> None:
    stops = tuple("a" * 1000 + chr(0x100 + i) for i in range(16))
    assembler = TextAssembler(byte_of, StopSet(stops))
    assert "".join(assembler.feed([97]) for _ in range(5000)) == "a" * 4000
    assert assembler.finish() == "a" * 1000
