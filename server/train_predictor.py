"""`verdraft train predictor`: recorded answers become states, and states a predictor that says how good it is."""

import argparse
from pathlib import Path

from verdraft.bench.plot import line_charts
from verdraft.bench.prompts import DataError
from verdraft.bench.traces import Coder, Messages, TraceReader
from verdraft.model.config import read_config
from verdraft.model.source import resolve_model
from verdraft.server.build import build_text
from verdraft.server.build_predictor import token_classes
from verdraft.server.errors import ApiError
from verdraft.server.parse_chat import parse_chat_prompt
from verdraft.server.service import Text
from verdraft.spec.replay import States, joined, replay
from verdraft.train.payoff import PayoffRecipe, about, train_predictor
from verdraft.train.payoff_report import charts, report


def coder_of(text: Text) -> Coder:
    """As the server itself goes from chats to ids."""

    def prompt(messages: Messages) -> list[int]:
        try:
            return text.template.encode(parse_chat_prompt({"messages": messages}))
        except ApiError as error:
            raise ValueError(str(error)) from error

    return Coder(prompt, text.tokenizer.encode_inner, text.eos)


def read_states(data: Path, model: str | None, longest: int, draft_len: int, without: tuple[str, ...]) -> States:
    """Every recorded answer in the folder `data`, replayed. Raises DataError and ModelError."""
    path = resolve_model(model)
    text = build_text(path, read_config(path).eos_token_ids)
    reader, classes = TraceReader(data, coder_of(text), longest, without), token_classes(text)
    parts = []
    for group in reader.groups():
        parts.append(replay([(answer for file in group for answer in reader.read(file))], classes, draft_len))
        print(
            f"{group[0].parent.name}/{group[0].stem}: {len(parts[-1].answers)} answers, "
            f"{len(parts[-1].drafted)} drafts",
            flush=True,
        )
    return joined(parts)


def run(arguments: argparse.Namespace) -> None:
    """Write the predictor and its calibration plot; print its report. Raises DataError and ModelError."""
    states = read_states(
        arguments.data, arguments.model, arguments.longest, arguments.draft_len, tuple(arguments.without)
    )
    if states.held_out.all() or not states.held_out.any():
        raise DataError("--data holds too few conversations to learn from some and judge by others")
    recipe = PayoffRecipe(arguments.epochs, arguments.batch, arguments.lr, arguments.seed)
    predictor = train_predictor(states, recipe)
    found, lines = report(states, predictor)
    predictor = predictor.with_record({**about(states, recipe), **found})
    predictor.save(arguments.out)
    line_charts(arguments.out.with_suffix(".svg"), charts(states, predictor), "observed")
    print("\n".join(lines))
