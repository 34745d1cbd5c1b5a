"""The `verdraft` command. What is heavy is imported inside the commands, so that --help is quick."""

import argparse
import sys
from collections.abc import Callable, Sequence

import verdraft
from verdraft.server.logs import set_up_logs
from verdraft.server.settings import Parser, SettingsError, add_flags, resolve_settings, warn_of_unknown_variables
from verdraft.server.signals import exit_now, on_stop_signals
from verdraft.server.train_cli import add_train_commands

Command = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Exit code 0 after a clean end, 2 with one line on stderr for anything the user can put right."""
    try:
        arguments = _parser().parse_args(argv)
        command: Command = arguments.command
        command(arguments)
    except SettingsError as error:
        _refuse(error)


def _refuse(error: Exception) -> None:
    print(f"verdraft: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(2)


def _parser() -> Parser:
    parser = Parser(prog="verdraft", description=(verdraft.__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"verdraft {verdraft.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="answer OpenAI-compatible HTTP requests", allow_abbrev=False)
    add_flags(serve)
    serve.set_defaults(command=_serve)
    pull = commands.add_parser("pull", help="fetch a model into the local cache", allow_abbrev=False)
    pull.add_argument("model", nargs="?", help="hub id or .gguf file; the demo model when left out")
    pull.set_defaults(command=_pull)
    doctor = commands.add_parser("doctor", help="say what is installed and which kernels run here", allow_abbrev=False)
    doctor.set_defaults(command=_doctor)
    add_train_commands(commands)
    return parser


def _serve(arguments: argparse.Namespace) -> None:
    on_stop_signals(exit_now)
    settings = resolve_settings({name: value for name, value in vars(arguments).items() if name != "command"})
    set_up_logs(settings.log_level, settings.log_format)
    warn_of_unknown_variables()
    from verdraft.server.build import build_service
    from verdraft.server.serve import run

    _user_errors(lambda: run(settings, lambda: build_service(settings)))


def _pull(arguments: argparse.Namespace) -> None:
    from verdraft.model.source import resolve_model

    _user_errors(lambda: print(resolve_model(arguments.model)))


def _doctor(arguments: argparse.Namespace) -> None:
    from verdraft.server.doctor import examine

    for line in examine():
        print(line)


def _user_errors(work: Callable[[], None]) -> None:
    """Say in one line what the user can put right: a model, a kernel backend, a setting."""
    from verdraft.kernels.base import KernelUnavailable
    from verdraft.model.errors import ModelError

    try:
        work()
    except (ModelError, KernelUnavailable) as error:
        _refuse(error)
