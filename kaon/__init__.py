"""Kaon's public Python API, and the only documented import::

    from kaon import LLM, SamplingParams

    with LLM("path/to/checkpoint") as llm:
        for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(result["text"])
        for index, delta in llm.stream(["Once upon a time"]):
            print(delta.text, end="")
        answer = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], temperature=0)
        print(answer.choices[0].message.content)

`LLM` is for scripts, with blocking calls; `AsyncLLM` for asyncio programs. Both run the model in an engine process of
their own. This package imports no torch.
"""

from typing import TYPE_CHECKING

from engine.client.core_manager import EngineDeadError
from engine.sampling_params import SamplingParams
from engine.text.io_processor import InvalidRequest
from engine.text.request_state import RequestDelta, RequestResult
from kaon.llm import LLM

if TYPE_CHECKING:
    from kaon.async_llm import AsyncLLM

__all__ = ["LLM", "AsyncLLM", "EngineDeadError", "InvalidRequest", "RequestDelta", "RequestResult", "SamplingParams"]


def __getattr__(name: str) -> object:
    # It imports the server, which `LLM` alone does not need.
    if name == "AsyncLLM":
        from kaon.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
