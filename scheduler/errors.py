"""Why a request is not admitted, or ends with an error. `code` is a code of the HTTP contract, section 3."""


class EngineError(Exception):
    """Base of everything that the engine refuses."""

    code = "internal_error"


class QueueFull(EngineError):
    """The waiting queue is at its bound."""

    code = "rate_limit_exceeded"


class ContextTooLong(EngineError):
    """The prompt can never fit the model's context or the KV pool."""

    code = "context_length_exceeded"

    def __init__(self, prompt_len: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_len} tokens; with one token to generate, at most {limit} tokens fit")
        self.prompt_len = prompt_len
        self.limit = limit


class EngineDead(EngineError):
    """The engine's thread has ended."""

    code = "engine_dead"
