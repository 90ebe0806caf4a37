"""Kaon's public Python API, and nothing else::

    from kaon import LLM, SamplingParams

    with LLM("path/to/checkpoint") as llm:
        for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(result["text"])
        for index, delta in llm.stream(["Once upon a time"]):
            print(delta.text, end="")

`LLM` runs the model in an engine-core process of its own. This package imports no torch.
"""

from engine.client.core_manager import EngineDeadError
from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.text.io_processor import InvalidRequest
from engine.text.request_state import RequestDelta, RequestResult

LLM = LLMEngine

__all__ = ["LLM", "EngineDeadError", "InvalidRequest", "RequestDelta", "RequestResult", "SamplingParams"]
