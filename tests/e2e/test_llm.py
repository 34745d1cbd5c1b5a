"""Offline use with the demo model."""

from pathlib import Path
from typing import Any

import pytest

from verdraft import LLM, SamplingParams
from verdraft.bench.tiny import tiny_model
from verdraft.scheduler.errors import ContextTooLong

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_blocks=256, threads=1, max_model_len=512)


def test_a_batch_says_what_each_prompt_says_alone(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    both = llm.generate(["The sea", "One two three"], greedy)
    assert "generating" in capsys.readouterr().err
    alone = llm.generate("One two three", greedy, use_tqdm=False)
    assert capsys.readouterr().err == ""
    assert both[1].outputs == alone[0].outputs
    assert len(alone[0].outputs[0].logprobs) == len(alone[0].outputs[0].token_ids) == 8
    by_ids = llm.generate([alone[0].prompt_token_ids], greedy, use_tqdm=False)
    assert by_ids == alone


def test_choices_stops_and_seeds(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=10)
    first, second = (llm.generate("The sea", params, use_tqdm=False)[0] for _ in range(2))
    assert first == second
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({choice.text for choice in first.outputs}) > 1
    chat = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0, stop="there"))
    assert (chat[0].outputs[0].text, chat[0].outputs[0].finish_reason) == ("Hello ", "stop")


def test_engines_are_told_in_one_way_that_top_k_is_off(llm: LLM) -> None:
    """A GPU kept no token of a request with -1 and another filter."""
    (request,) = llm._submit("a", [5, 6], SamplingParams(top_k=-1, top_p=0.9))
    llm._engine.abort(request)
    assert request.params == SamplingParams(top_k=0, top_p=0.9)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ("", None),
        ([[-1]], None),
        ([[]], None),
        ([1, 2], None),
        ([1.5], None),
        (None, None),
        ([[True]], None),
        ("\ud83d", None),
        (["a", "b"], [SamplingParams()]),
        ("a", SamplingParams(logit_bias={10**9: 1.0})),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, params: Any) -> None:
    with pytest.raises(ValueError, match=r"token|expected"):
        llm.generate(prompts, params)


def test_a_prompt_that_does_not_fit_submits_nothing(llm: LLM) -> None:
    with pytest.raises(ContextTooLong):
        llm.generate(["a", "word " * 600])
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_an_answer_is_as_short_as_in_vllm_unless_asked_otherwise(llm: LLM) -> None:
    """Without a limit one went on to the end of the context, for minutes."""
    default, whole = SamplingParams(ignore_eos=True), SamplingParams(ignore_eos=True, max_tokens=None)
    found = llm.generate(["a", "a"], [default, whole], use_tqdm=False)
    lens = [len(answer.outputs[0].token_ids) for answer in found]
    assert lens[0] == default.max_tokens < lens[1]


def test_bad_messages(llm: LLM) -> None:
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"role": "wizard", "content": "x"}])


SWITCHED = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% if brief %}Briefly: {% endif %}"
    "{{ messages[-1].content }}"
)


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text(SWITCHED)
    llm = LLM(str(folder), kv_blocks=16, threads=1, max_model_len=128, speculation="off")
    tool = {"type": "function", "function": {"name": "weather"}}
    params = SamplingParams(temperature=0, max_tokens=1)
    chat = [{"role": "user", "content": "Hi."}]
    found = llm.chat(chat, params, tools=[tool], chat_template_kwargs={"brief": True})
    assert found == llm.generate("weather;Briefly: Hi.", params)
    assert llm.chat(chat, params) == llm.generate("Hi.", params)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"chat_template_kwargs": {"no_such": 1}}, "no_such"),
        ({"chat_template_kwargs": {"messages": 1}}, "messages"),
    ],
)
def test_nothing_that_the_template_does_not_read(llm: LLM, options: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        llm.chat([{"role": "user", "content": "Hi."}], **options)


def test_a_variable_that_sets_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`verdraft serve` said so, but a typo beside LLM went unnoticed."""
    monkeypatch.setenv("VERDRAFT_THREAD", "1")
    LLM(str(tiny_model(tmp_path)), kv_blocks=16, threads=1, max_model_len=64, speculation="off")
    assert "VERDRAFT_THREAD: there is no such setting; the nearest is VERDRAFT_THREADS" in caplog.text


def test_only_offline_settings() -> None:
    with pytest.raises(TypeError, match="port"):
        LLM(port=80)
