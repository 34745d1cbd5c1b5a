"""verdraft: an LLM server whose speculative decoding never changes a token.

`LLM` and `SamplingParams` are for offline use; they load on first access so that
`import verdraft` stays cheap.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verdraft.server.llm import LLM
    from verdraft.server.llm_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = version("verdraft")


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        from verdraft.server import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'verdraft' has no attribute {name!r}")
