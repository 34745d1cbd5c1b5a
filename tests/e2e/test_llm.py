"""Offline use with the demo model."""

from typing import Any

import pytest

from verdraft import LLM, SamplingParams
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


def test_only_offline_settings() -> None:
    with pytest.raises(TypeError, match="port"):
        LLM(port=80)
