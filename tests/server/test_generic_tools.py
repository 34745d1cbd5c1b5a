"""What a model without a tool template is told about the functions of which it will call one."""

from typing import Any

from verdraft.server.generic_tools import describe_forced

USER = {"role": "user", "content": "Weather?"}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_a_system_turn_tells_of_one_function() -> None:
    told, user = describe_forced([USER], [tool("sky", description="The sky", parameters={"type": "object"})])
    assert user == USER
    assert told["role"] == "system"
    for part in ("sky: The sky", '{"type": "object"}', "this function"):
        assert part in told["content"]


def test_it_joins_the_system_turn_that_is_there() -> None:
    (told, user) = describe_forced([{"role": "system", "content": "Be kind."}, USER], [tool("a"), tool("b")])
    assert told["content"].startswith("Be kind.\n\n")
    assert "one of these functions" in told["content"]
    assert user == USER
