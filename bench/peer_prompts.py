"""Prompts for the comparison with peers: short chats, copying tasks of about 350 tokens, calls of tools, objects by a
schema, long ones to prefill."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TypeVar

from verdraft.bench.prompts import Prompt, load

Messages = Sequence[dict[str, str]]
_Item = TypeVar("_Item")

_LONG_CHARS = 3000  # what is left of a long prompt: about 700 tokens
_EDIT_CHARS = range(900, 1500)  # edits of 250 to 450 tokens
_CHAT_CHARS = range(400)
_AGENTIC_CHARS = range(3000)  # with the answer within the context that every peer gets
_STRUCTURED_CHARS = range(2000)

_CHATS = (
    "Explain in a few sentences why the sky is blue.",
    "What should I pack for a week of hiking in the mountains?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How does a bicycle stay upright while it moves?",
)
_TOPICS = (
    *("a lost umbrella", "the first snow", "an old bridge", "a night train", "a garden in spring", "a broken clock"),
    *("two brothers", "a market by the sea", "a slow river", "a quiet library", "a new teacher", "a paper boat"),
    *("the last bus", "a hungry fox", "a long letter", "a small bakery", "an empty theatre", "a summer storm"),
    *("a borrowed book", "the tallest tree", "a painted door", "a lucky coin", "an early frost", "a singing bird"),
)
_CODE = '''\
class Inventory:
    """Items of a shop, by name, with how many there are and what one costs."""

    def __init__(self):
        self.items = {}
        self.history = []

    def add(self, name, count, price):
        if count < 0:
            raise ValueError("count must not be negative")
        if name in self.items:
            old_count, _ = self.items[name]
            self.items[name] = (old_count + count, price)
        else:
            self.items[name] = (count, price)
        self.history.append(("add", name, count))

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        old_count, price = self.items[name]
        if old_count < count:
            raise ValueError("there are not enough items")
        self.items[name] = (old_count - count, price)
        self.history.append(("remove", name, count))

    def total(self):
        return sum(count * price for count, price in self.items.values())

    def report(self):
        for name, (count, price) in sorted(self.items.items()):
            print(f"{name}: {count} at {price}")'''
_LETTER = """\
Dear members of the walking club,

Thank you all for coming to our meeting last Thursday. It was good to see so many of you, and we were glad to welcome \
three new members. As we agreed, our next walk will take place on Saturday, the ninth of May. We will meet at the \
railway station in Milton at half past eight in the morning. Please be on time, because the bus to the trail leaves at \
a quarter to nine and the next one comes only two hours later.

The route follows the river for about six kilometres, then climbs through the forest to the old watchtower. From there \
you can see the whole valley on a clear day. We will have lunch at the tower, so please bring your own food and enough \
water. There is no shop on the way. The descent is steep in some places, and good boots are a must. If it rains hard, \
we will move the walk to the following Saturday and let you know by telephone on Friday evening.

The cost is four pounds for the bus. Please tell Margaret by Wednesday if you would like to come, so that she can book \
enough seats. Dogs are welcome if they are kept on a lead. Children under twelve must come with an adult.

We look forward to seeing you in May.

With best wishes,
Harold Finch"""
_EDITS = (
    f"Rename the class Inventory to Store. Answer with the whole code, otherwise unchanged.\n\n{_CODE}",
    f"Repeat this letter word for word, but change Milton to Ashford.\n\n{_LETTER}",
    f"Copy this code exactly, with the method total renamed to value.\n\n{_CODE}",
    f"Copy this letter exactly, but change Margaret to Susan.\n\n{_LETTER}",
)
_TOOLS = """\
You answer by calling tools. Write every call as a JSON object with "name" and "arguments", one a line.

{"name": "find_train", "parameters": {"from": "string", "to": "string", "day": "string"}}
{"name": "book_seat", "parameters": {"train": "string", "class": "first or second", "seats": "integer"}}
{"name": "send_message", "parameters": {"to": "string", "text": "string"}}"""
_CALLS = tuple(
    f"{_TOOLS}\n\n{wish}"
    for wish in (
        "Find the trains from Leeds to York on Monday, from York to Leeds on Friday, and from Leeds to Hull on Sunday.",
        "Book two seats in second class on train N12 and one in first class on N14, and tell Ruth and Omar.",
        "Tell Ruth, Omar and Lena that the train from Hull on Sunday is full, then find those of Monday and Tuesday.",
        "Find trains from York to Hull on every day from Monday to Thursday and book a seat on N20 and on N22.",
    )
)
_EXTRACTS = tuple(
    f"Write {kind} named below into one JSON list of objects. Answer with the JSON only.\n\n{text}"
    for kind, text in (
        (
            'every book with "title", "author", "year" and "shelf"',
            '"The Salt Road" by Ines Duarte came out in 1987 and stands on shelf B2, "A Winter Ledger", written by Tom '
            'Hale in 1991, beside it. "Small Engines" by Ines Duarte, of 2003, is on shelf C4.',
        ),
        (
            'every place with "name", "food", "price" and "area"',
            "The Copper Pot sells Italian food at moderate prices by the river. Blue Anchor, in the city centre, has "
            "cheap fish. French food in the old town is what Chez Odile is known and dear for.",
        ),
        (
            'every appointment with "who", "day", "time" and "room"',
            "Dr Okafor sees Mr Lind on Tuesday at 9:30 in room 4 and Mrs Hale at 10:15 in the same room. On Thursday "
            "Dr Brandt has room 7: Miss Ito at 14:00, and Mr Lind once more at 15:45.",
        ),
        (
            'every order with "customer", "item", "count" and "paid"',
            "Harbour Hotel ordered 40 towels and has paid. The 12 lamps for Studio North are not paid yet, nor are "
            "their 3 desks. Casa Verde paid for 25 chairs on Monday.",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class PeerPrompts:
    """Own prompts and those of the data folder take turns in each list."""

    chat: list[Messages]
    edit: list[Messages]
    agentic: list[Messages]
    structured: list[Messages]
    long: list[Messages]
    streams: list[Messages]

    @property
    def num_streams(self) -> int:
        """The most streams that can have a prompt of their own."""
        return len(self.streams)


def peer_prompts(folder: str) -> PeerPrompts:
    """The project's own prompts, with those of `folder` unless it is empty. Raises DataError."""
    found = load(folder) if folder else []
    longs = [_cut(f"Summarise these notes, number {n}.\n\n{_LETTER}\n\n{_CODE}\n\n{_LETTER}") for n in range(4)]
    return PeerPrompts(
        chat=_in_turn(map(_user, _CHATS), _fitting(found, "chat", _CHAT_CHARS)),
        edit=_in_turn(map(_user, _EDITS), _fitting(found, "edit", _EDIT_CHARS)),
        agentic=_in_turn(map(_user, _CALLS), _fitting(found, "agentic", _AGENTIC_CHARS)),
        structured=_in_turn(map(_user, _EXTRACTS), _fitting(found, "structured", _STRUCTURED_CHARS)),
        long=_in_turn(longs, [_cut(p.messages[-1]["content"]) for p in found if p.workload == "long"]),
        streams=[_user(f"Write a short story about {topic}.") for topic in _TOPICS],
    )


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _cut(text: str) -> Messages:
    return _user(text[:_LONG_CHARS])


def _fitting(prompts: Iterable[Prompt], workload: str, chars: range) -> list[Messages]:
    return [p.messages for p in prompts if p.workload == workload and p.num_chars in chars]


def _in_turn(own: Iterable[_Item], others: Iterable[_Item]) -> list[_Item]:
    return [item for item in chain.from_iterable(zip_longest(own, others)) if item is not None]
