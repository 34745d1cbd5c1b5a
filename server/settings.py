"""The server's settings, defined once: every field is a flag, a VERDRAFT_ variable and a key of the YAML file.

Nothing heavy is imported here, so that `verdraft --help` is quick.
"""

import argparse
import difflib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

PREFIX = "VERDRAFT_"
OTHER_VARIABLES = ("VERDRAFT_TEST_HOOKS", "VERDRAFT_DATA", "VERDRAFT_CMD")  # of tests and benchmarks


# What a value must be, by pydantic's name of the problem and with its figures.
EXPECTED = {
    "bool_parsing": "must be true or false",
    "extra_forbidden": "there is no such setting",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_parsing": "must be an integer",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}


class SettingsError(Exception):
    """An unknown flag, a value out of range or a contradiction; the message is one line that names it."""


def _draft_shape(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]?(,[1-9][0-9]?,[1-9][0-9]{0,2})?", text):
        raise ValueError(
            "must be DEPTH, or DEPTH,TOPK,TOKENS, whole numbers from 1 to 99, 99 and 999; for example 4, or 4,4,16"
        )
    return text


class Settings(BaseSettings):
    """Priority: flags, then environment variables, then the YAML file, then these defaults."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True, protected_namespaces=()
    )

    model: Annotated[
        str | None, Field(min_length=1, description="folder, hub id or .gguf file; the demo model when left out")
    ] = None
    served_model_name: Annotated[
        str | None, Field(min_length=1, description="the model's name for clients; default: the folder's name")
    ] = None
    host: Annotated[str, Field(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    api_key: Annotated[
        SecretStr | None,
        Field(min_length=1, description="key that clients must send; several with commas; @FILE: one a line"),
    ] = None
    max_model_len: Annotated[
        int | None, Field(ge=2, description="longest prompt and output together, in tokens; default: the model's")
    ] = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096, description="sequences decoded together")] = 16
    max_queue: Annotated[int, Field(ge=0, description="requests that may wait beyond those; the next gets 429")] = 256
    max_batch_tokens: Annotated[
        int | None,
        Field(ge=2, description="tokens in one step, all sequences together; default: 256, or two a sequence if more"),
    ] = None
    max_connections: Annotated[
        int, Field(ge=1, le=1_000_000, description="open connections; beyond them the longest idle one is closed")
    ] = 4096
    max_body_bytes: Annotated[int, Field(ge=1024, description="longest request body")] = 4 << 20
    kv_blocks: Annotated[int | None, Field(ge=2, description="blocks in the KV pool; default: as memory allows")] = None
    block_size: Annotated[
        int | None, Field(ge=1, le=1024, description="tokens in a block; default: as the kernels like it, 16 on a CPU")
    ] = None
    memory_fraction: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="part of the free memory that the KV pool takes, at start: no step waits for memory later",
        ),
    ] = None
    speculation: Annotated[
        Literal["auto", "off", "suffix", "early_exit", "hispec", "eagle", "hybrid"],
        Field(
            description="what a request's speculation `auto` means; with off, a request's own prediction is still tried"
        ),
    ] = "auto"
    router: Annotated[
        Literal["payoff", "threshold", "score"],
        Field(
            description="how hybrid chooses: payoff (most tokens a second), threshold (the suffix draft when a payoff "
            "above 6 is predicted, else a model's) or score (the same by its own score)"
        ),
    ] = "payoff"
    exits: Annotated[
        str,
        Field(
            min_length=1,
            description="early exits: auto (heads that come with verdraft), none, a folder of heads, or two layers D,I",
        ),
    ] = "auto"
    eagle: Annotated[
        str,
        Field(min_length=1, description="EAGLE3 head: auto (one that comes with verdraft), none, or a head's folder"),
    ] = "auto"
    eagle_draft: Annotated[
        str,
        AfterValidator(_draft_shape),
        Field(description="what an EAGLE3 head drafts: chains of DEPTH tokens, or trees: DEPTH,TOPK,TOKENS"),
    ] = "4"
    predictor: Annotated[
        str,
        Field(
            min_length=1,
            description="payoff predictor: auto (the one that comes with verdraft), none, or a file; what is learnt "
            "while serving is kept in the file, which need not be there yet",
        ),
    ] = "auto"
    learning: Annotated[
        Literal["on", "off"], Field(description="whether the predictor goes on learning while serving")
    ] = "on"
    suffix_cache: Annotated[
        Path | None,
        Field(description="file that keeps finished answers, as token ids, for suffix drafts after a restart"),
    ] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Field(description="float type")] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="where the model runs")] = "auto"
    kernels: Annotated[
        str, Field(min_length=1, description="kernel backend: auto, or one that `verdraft doctor` lists")
    ] = "auto"
    deterministic: Annotated[
        bool, Field(description="only kernels whose results never depend on what else is computed; CPU kernels are so")
    ] = False
    cuda_graphs: Annotated[
        bool, Field(description="record short passes on a GPU and replay them, each as one launch")
    ] = False
    tensor_parallel: Annotated[
        int, Field(ge=1, le=64, description="processes, a GPU each, that share every layer; they change no bit")
    ] = 1
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        Field(
            description="weights; auto: as they are, on a CPU with blocks of 4 or 8 bits beside them where exact; "
            "int4 on a CPU only, fp8 on a GPU only"
        ),
    ] = "auto"
    activations: Annotated[
        Literal["float", "int8"],
        Field(
            description="what weights are multiplied with; int8: inputs rounded to 8 bits in groups of 32, quicker and "
            "a slightly different model; needs weights in blocks, and a CPU"
        ),
    ] = "float"
    threads: Annotated[
        int | None,
        Field(
            ge=1, le=1024, description="CPU threads for the model; default: one a core, within the container's limit"
        ),
    ] = None
    request_timeout: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="seconds for waiting and running together; 0: none")
    ] = 600.0
    drain_timeout: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM")
    ] = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(description="least level to log")] = "info"
    log_format: Annotated[Literal["text", "json"], Field(description="lines for people, or JSON objects")] = "text"
    config: Annotated[Path | None, Field(description="YAML file with these settings")] = None

    @model_validator(mode="after")
    def _no_contradiction(self) -> "Settings":
        if self.kv_blocks is not None and self.memory_fraction is not None:
            raise ValueError("--kv-blocks and --memory-fraction both set the size of the KV pool; give one of them")
        if self.activations == "int8" and self.quantization in ("none", "fp8"):
            raise ValueError(
                f"--activations int8 needs weights in blocks, which --quantization {self.quantization} leaves out"
            )
        if self.max_batch_tokens is not None and self.max_batch_tokens < 2 * self.max_num_seqs:
            raise ValueError(
                f"--max-batch-tokens must be at least twice --max-num-seqs ({2 * self.max_num_seqs}), so that prompts "
                "are computed beside the sequences that decode"
            )
        return self

    def api_keys(self) -> tuple[str, ...]:
        """Every key that opens the server; none: no key is needed. Raises SettingsError, which shows no key."""
        if self.api_key is None:
            return ()
        given = self.api_key.get_secret_value()
        keys = _keys_of_file(Path(given[1:])) if given.startswith("@") else given.split(",")
        keys = [key.strip() for key in keys]
        if not all(keys) or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise SettingsError("--api-key: a key must be printable ASCII without spaces, and none may be empty")
        return tuple(keys)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = init_settings().get("config") or os.environ.get(f"{PREFIX}CONFIG")
        if not path:
            return init_settings, env_settings
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path)


def _keys_of_file(path: Path) -> list[str]:
    """One a line; empty lines and lines that begin with # count for nothing."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key: cannot read {str(path)!r} ({type(error).__name__})") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"--api-key: there is no key in {str(path)!r}")
    return keys


class Parser(argparse.ArgumentParser):
    """argparse with one line on stderr instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of Settings; MODEL is the only positional argument."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=Settings.model_fields["model"].description)
    for name, field in Settings.model_fields.items():
        if name == "model":
            continue
        default = "" if field.default is None else f" (default: {field.default})"
        help_text = f"{field.description}{default}".replace("%", "%%")
        kind: dict[str, Any] = {"metavar": "X"}
        if field.annotation is bool:  # without a value, which would else be taken from the MODEL behind it
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag(name), default=argparse.SUPPRESS, help=help_text, **kind)


def flag(name: str) -> str:
    """`max_queue` -> `--max-queue`."""
    return "--" + name.replace("_", "-")


def resolve_settings(flags: dict[str, Any]) -> Settings:
    """Settings from parsed flags, the environment and the YAML file. Raises SettingsError."""
    path = flags.get("config") or os.environ.get(f"{PREFIX}CONFIG")
    if path and not Path(path).is_file():
        raise SettingsError(f"--config: there is no file {str(path)!r}")
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise SettingsError(f"--config: {path} is not a YAML file of settings: {_flat(error)}") from None


def warn_of_unknown_variables() -> None:
    """Into the log, once settings are read."""
    for problem in unknown_variables(os.environ):
        logging.getLogger("verdraft.server").warning(problem)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each VERDRAFT_ variable that sets nothing. No errors: orchestrators make such variables too."""
    known = [*(PREFIX + name.upper() for name in Settings.model_fields), *OTHER_VARIABLES]
    found = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0)[0]
            found.append(f"{name}: there is no such setting; the nearest is {nearest}")
    return found


def parse_flags(argv: Sequence[str]) -> Settings:
    """Settings from command line arguments alone, as `verdraft serve` reads them. Raises SettingsError."""
    parser = Parser(prog="verdraft serve", allow_abbrev=False)
    add_flags(parser)
    return resolve_settings(vars(parser.parse_args(argv)))


def _one_line(error: ValidationError) -> str:
    """Every problem, without the values: one of them may be the key."""
    parts = []
    for problem in error.errors(include_url=False, include_input=False):
        name = ".".join(str(part) for part in problem["loc"])
        plain = problem["msg"].removeprefix("Value error, ")
        expected = EXPECTED.get(problem["type"])
        message = expected.format_map(problem.get("ctx", {})) if expected else plain
        parts.append(f"{flag(name)}: {message}" if name else message)
    return "; ".join(parts)


def _flat(error: Exception) -> str:
    return " ".join(str(error).split())
