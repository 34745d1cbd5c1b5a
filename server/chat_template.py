"""From chat messages to the ids that the model prefills, by the model's own Jinja template.

Template safety: what a user wrote never becomes a special token. The template is rendered twice, plainly and with every
character of the user's strings that occurs in a special token's text *disguised* as a private-use character. The second
rendering therefore holds exactly the special tokens that the template itself wrote. When the plain one holds as many,
the user created none and it is tokenised as usual; otherwise special tokens are taken from the disguised one, and the
rest is tokenised as ordinary text. Knows no HTTP.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import TemplateError

from verdraft.model.errors import ModelError
from verdraft.server.errors import ApiError, invalid_value, unsupported_parameter
from verdraft.server.generic_tools import describe_forced, describe_tool_turns
from verdraft.server.requests import ChatPrompt
from verdraft.server.template_jinja import Template, compile_template
from verdraft.server.thinking import CLOSE, THINKING_SWITCH
from verdraft.server.tokenizer import TextTokenizer, special_token
from verdraft.server.tool_calls import own_format

Values: TypeAlias = dict[str, Any]

# For models without a template: one paragraph per message, e.g. "User: Hi.\n\nAssistant:".
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0x10FFFD
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A folder's template: chat_template.jinja, chat_template.json or tokenizer_config.json, else DEFAULT_TEMPLATE.

    `thinks`: answers may begin with thoughts between marks. `calls`: how answers write calls of tools, if they do.
    `knows_tools`: whether it shows the model any.
    """

    def __init__(self, folder: Path, tokenizer: TextTokenizer) -> None:
        """Raises ModelError when the template does not compile."""
        self._tokenizer = tokenizer
        sources = _read_sources(folder, tokenizer.config)
        try:
            self._plain = compile_template(sources.get("default", DEFAULT_TEMPLATE))
            self._with_tools = compile_template(sources.get("tool_use", sources.get("default", DEFAULT_TEMPLATE)))
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self.thinks = CLOSE in sources.get("default", "")
        self.calls = own_format(sources.get("tool_use", sources.get("default", "")))
        self.knows_tools = "tool" in sources.get("tool_use", sources.get("default", DEFAULT_TEMPLATE))
        self._text_arguments = self.knows_tools and _wants_text_arguments(self._with_tools)
        self._variables = self._plain.variables | self._with_tools.variables
        names = {name: special_token(tokenizer.config, name) for name in _SPECIAL_NAMES}
        self._constants = {name: text for name, text in names.items() if text}
        self._alphabet = sorted({char for text in tokenizer.control_texts for char in text if not char.isspace()})

    def encode(self, prompt: ChatPrompt, check: Callable[[str], None] = lambda text: None) -> list[int]:
        """The prompt's ids. `check` sees the whole text before it is tokenised, and may raise.

        Raises:
            ApiError: 400 `messages` when the template refuses these messages, or fails on them; 400 `thinking` when it
                has no switch for that.
        """
        self._check_variables(prompt)
        prompt = self._switched(prompt)
        values = self._values(prompt)
        strings = "\n".join(_strings(values["messages"]) + _strings(values["tools"]))
        disguise = Disguise.for_text(self._alphabet, strings)
        plain = self._render(prompt, values, disguise, hidden=False)
        check(plain)
        if not self._tokenizer.control_texts:
            return self._tokenizer.encode(plain, allow_special=True)
        hidden = self._render(prompt, values, disguise, hidden=True)
        if self._user_made_none(plain, hidden, strings, disguise):
            return self._tokenizer.encode(plain, allow_special=True)
        return self._tokenizer.encode_guarded(hidden, disguise.reveal)

    def _check_variables(self, prompt: ChatPrompt) -> None:
        """A variable that the template does not read would be ignored, and one with control text would make turns."""
        for name, value in prompt.variables.items():
            param = f"chat_template_kwargs.{name}"
            if name in self._constants or name not in self._variables:
                raise invalid_value(param, "the model's chat template has no such variable")
            if isinstance(value, str) and self._tokenizer.count_controls(value):
                raise invalid_value(param, "holds the text of a special token")

    def _switched(self, prompt: ChatPrompt) -> ChatPrompt:
        """Tells the template when there are to be no thoughts."""
        if prompt.no_thoughts and THINKING_SWITCH in self._variables:
            return replace(prompt, variables={**prompt.variables, THINKING_SWITCH: False})
        if prompt.no_thoughts and self.thinks:
            raise unsupported_parameter("thinking", "'thinking' cannot be disabled: this model decides by itself")
        return prompt

    def _user_made_none(self, plain: str, hidden: str, strings: str, disguise: "Disguise") -> bool:
        count = self._tokenizer.count_controls
        if count(plain) != count(hidden):
            return False
        # Equal counts could only mislead when the template looked at the content and wrote something else for it.
        return hidden.translate(disguise.reveal) == plain or count(strings) == 0

    def _values(self, prompt: ChatPrompt) -> Values:
        """Messages and tools as templates expect them; control text in object keys cannot be disguised."""
        known = self.knows_tools
        parsed = known and not self._text_arguments
        messages = [_parsed_arguments(m) if parsed else m for m in describe_tool_turns(prompt.messages, known)]
        if prompt.forced and not known:
            messages = describe_forced(messages, prompt.forced)
        tools = list(prompt.tools) if prompt.tools and known else None
        for name, value in (("messages", messages), ("tools", tools)):
            if any(self._tokenizer.count_controls(key) for key in _keys(value)):
                raise invalid_value(name, "the name of a property holds the text of a special token")
        return {"messages": messages, "tools": tools}

    def _render(self, prompt: ChatPrompt, values: Values, disguise: "Disguise", hidden: bool) -> str:
        if hidden:
            values = self._hidden(values, disguise)
        messages = values["messages"]
        if prompt.continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + disguise.end}]
        template = self._with_tools if values["tools"] else self._plain
        text = _run(
            template.render,
            {**self._constants, **prompt.variables, **values, "messages": messages},
            add_generation_prompt=prompt.add_generation_prompt,
        )
        return _cut_behind(text, disguise.end) if prompt.continue_final_message else text

    def _hidden(self, values: Values, disguise: "Disguise") -> Values:
        """Templates may look for markup such as <think> in what the assistant said, so that stays visible there."""

        def hide(text: str) -> str:
            return text.translate(disguise.hide)

        def hidden_message(message: Mapping[str, Any]) -> Any:
            changed = _mapped(message, hide)
            if message["role"] == "assistant":
                changed["content"] = self._tokenizer.change_outside_markup(message["content"], hide)
            return changed

        messages = [hidden_message(message) for message in values["messages"]]
        return {"messages": messages, "tools": _mapped(values["tools"], hide)}


class Disguise:
    """A one-to-one mapping of an alphabet to private-use characters that the text does not hold."""

    def __init__(self, alphabet: list[str], first: int) -> None:
        self.hide = {ord(char): first + index for index, char in enumerate(alphabet)}
        self.reveal = {code: chr(char) for char, code in self.hide.items()}
        self.end = chr(first + len(alphabet))  # marks the end of the last message

    @classmethod
    def for_text(cls, alphabet: list[str], text: str) -> "Disguise":
        """Raises ApiError when the text uses up all private-use characters."""
        used = {ord(char) for char in set(text) if ord(char) >= _FIRST_PRIVATE}
        size = len(alphabet) + 1
        for first in range(_FIRST_PRIVATE, _LAST_PRIVATE - size, size):
            if used.isdisjoint(range(first, first + size)):
                return cls(alphabet, first)
        raise invalid_value("messages", "too many different private-use characters")


def _run(render: Callable[..., str], values: Values, add_generation_prompt: bool) -> str:
    try:
        return render(values, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise invalid_value("messages", f"the model's chat template refuses them: {error.message}") from None
    except Exception as error:  # whatever Python raises inside a template that did not expect these messages
        raise invalid_value("messages", f"the model's chat template fails on them ({type(error).__name__})") from None


def _cut_behind(text: str, end: str) -> str:
    if end not in text:
        raise ApiError(
            400,
            "invalid_value",
            "the model's chat template cannot leave the last message open",
            "continue_final_message",
        )
    return text[: text.rindex(end)].replace(end, "")


def _read_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; most models have only "default"."""
    jinja, other = folder / "chat_template.jinja", folder / "chat_template.json"
    try:
        if jinja.is_file():
            return {"default": jinja.read_text(encoding="utf-8")}
        found = json.loads(other.read_text(encoding="utf-8")) if other.is_file() else config
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the chat template: {error}") from error
    template = found.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}


def _wants_text_arguments(template: Template) -> bool:
    """Most templates expect the arguments of a call as an object; a few put JSON text together, and fail on objects."""

    def renders(arguments: Any) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            template.render({"messages": [{"role": "user", "content": "x"}, turn]}, add_generation_prompt=False)
        except Exception:  # whatever a template raises, it cannot take these arguments
            return False
        return True

    return renders("{}") and not renders({})


def _parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the arguments of calls as objects; text that is none stays as it is."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _parsed_function(call["function"])} for call in calls]}


def _parsed_function(function: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string changed, but for object keys and roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: entry if key == "role" else _mapped(entry, change) for key, entry in value.items()}
    return value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for entry in entries for text in _strings(entry)]


def _keys(value: Any) -> list[str]:
    if isinstance(value, list):
        return [key for entry in value for key in _keys(entry)]
    if isinstance(value, dict):
        return [*value, *(key for entry in value.values() for key in _keys(entry))]
    return []
