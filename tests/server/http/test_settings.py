"""One definition: flags, environment, YAML file, and what is refused."""

from pathlib import Path
from typing import get_args

import pytest

from verdraft.scheduler.request import Mode
from verdraft.server.cli import main
from verdraft.server.serve import bind
from verdraft.server.settings import Settings, SettingsError, parse_flags, unknown_variables


def test_defaults() -> None:
    settings = parse_flags([])
    assert (settings.host, settings.port, settings.max_queue, settings.max_body_bytes) == (
        "127.0.0.1",
        8000,
        256,
        1 << 22,
    )
    assert settings.block_size is None
    assert len(Settings.model_fields) <= 37


def test_flags_beat_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_queue: 1\nmax_num_seqs: 1\nport: 1\nmodel: some/where\n")
    monkeypatch.setenv("VERDRAFT_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("VERDRAFT_PORT", "2")
    monkeypatch.setenv("VERDRAFT_API_KEY", "sk-x")
    settings = parse_flags(["--config", str(file), "--port", "3"])
    assert (settings.max_queue, settings.max_num_seqs, settings.port) == (1, 2, 3)
    assert settings.model == "some/where"
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "sk-x"
    assert "sk-x" not in repr(settings)


@pytest.mark.parametrize(
    ("flags", "expected"), [([], False), (["--deterministic"], True), (["--no-deterministic"], False)]
)
def test_a_switch_takes_no_value(flags: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once took the MODEL behind it for one."""
    monkeypatch.setenv("VERDRAFT_DETERMINISTIC", "true" if "--no-deterministic" in flags else "")
    settings = parse_flags([*flags, "some/model"])
    assert (settings.deterministic, settings.model) == (expected, "some/model")


def test_a_switch_in_the_environment_is_true_or_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERDRAFT_DETERMINISTIC", "perhaps")
    with pytest.raises(SettingsError, match="--deterministic: must be true or false"):
        parse_flags([])


def test_a_variable_that_sets_nothing_is_named_with_the_nearest_one() -> None:
    """A typo once left a server without a key, and nobody was told."""
    environment = {"VERDRAFT_API_KEYS": "sk-x", "verdraft_port": "1", "VERDRAFT_TEST_HOOKS": "1", "PATH": "/bin"}
    assert unknown_variables(environment) == [
        "VERDRAFT_API_KEYS: there is no such setting; the nearest is VERDRAFT_API_KEY"
    ]


def test_the_file_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text("port: 5\n")
    monkeypatch.setenv("VERDRAFT_CONFIG", str(tmp_path / "s.yaml"))
    assert parse_flags([]).port == 5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-q", "3"], "--max-q"),
        (["--speculation", "magic"], "--speculation"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--block-size", "x"], "--block-size"),
        (["--block-size", "0"], "--block-size"),
        (["--deterministic=perhaps"], "--deterministic"),
        (["--kv-blocks", "1"], "--kv-blocks"),
        (["--threads", "100000"], "--threads"),
        (["--kv-blocks", "9", "--memory-fraction", "0.5"], "--memory-fraction"),
        (["--max-num-seqs", "9", "--max-batch-tokens", "17"], "--max-batch-tokens"),
        (["--activations", "int4"], "--activations"),
        (["--activations", "int8", "--quantization", "none"], "--activations int8 needs weights in blocks"),
        (["--activations", "int8", "--quantization", "fp8"], "--activations int8 needs weights in blocks"),
        (["--request-timeout", "nan"], "--request-timeout"),
        (["--api-key", ""], "--api-key"),
        (["--log-format", "xml"], "--log-format"),
        (["--config", "/no/such/file"], "--config"),
        (["one", "two"], "two"),
        (["--port"], "--port"),
    ],
)
def test_refusals_are_one_line_and_code_2(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert named in printed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--eagle-draft", "4,4"], "must be DEPTH, or DEPTH,TOPK,TOKENS"),
        (["--eagle-draft", "0"], "must be DEPTH, or DEPTH,TOPK,TOKENS"),
        (["--max-queue", "many"], "must be an integer"),
        (["--port", "65536"], "must be at most 65535"),
        (["--kv-blocks", "1"], "must be at least 2"),
        (["--memory-fraction", "0"], "must be more than 0"),
        (["--drain-timeout", "soon"], "must be a number"),
        (["--drain-timeout", "inf"], "must be a finite number"),
        (["--learning", "yes"], "must be 'on' or 'off'"),
        (["--host", ""], "must not be empty"),
        (["--api-key", ""], "must not be empty"),
        ([""], "must not be empty"),
    ],
)
def test_a_refusal_says_what_was_expected(flags: list[str], expected: str) -> None:
    """One of them used to print a regular expression."""
    with pytest.raises(SettingsError, match=expected):
        parse_flags(flags)


@pytest.mark.parametrize("text", ["max_queu: 1\n", "[1, 2]", "a: [", "max_queue: many\n"])
def test_bad_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        parse_flags(["--config", str(file)])
    assert "\n" not in str(refused.value)


def test_a_refusal_never_shows_the_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("api_key: [sk-secret]\n")
    with pytest.raises(SettingsError) as refused:
        parse_flags(["--config", str(tmp_path / "s.yaml")])
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize("given", ["sk-secret,", "sk secret", "sk-\u00fc", "@/no/such/file", "@{empty}"])
def test_bad_keys(given: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    settings = parse_flags(["--api-key", given.replace("{empty}", str(tmp_path / "empty"))])
    with pytest.raises(SettingsError, match="--api-key") as refused:
        settings.api_keys()
    assert "secret" not in str(refused.value)


def test_a_port_that_another_server_has_taken_is_refused() -> None:
    """Two servers that started together once both loaded a model, and one of them then listened nowhere."""
    with bind(Settings(port=0)) as taken, pytest.raises(SettingsError, match="in use"):
        bind(Settings(port=taken.getsockname()[1]))


def test_every_mode_of_the_engine_is_a_value_of_the_flag() -> None:
    assert set(get_args(Settings.model_fields["speculation"].annotation)) == set(get_args(Mode))


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in ((["serve", "--help"], "--kv-blocks"), (["--version"], "verdraft "), (["--help"], "pull")):
        with pytest.raises(SystemExit) as ended:
            main(flags)
        assert ended.value.code == 0
        assert text in capsys.readouterr().out
