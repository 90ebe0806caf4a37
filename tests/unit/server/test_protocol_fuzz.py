"""Any JSON becomes parameters that the engine accepts, or a `BadRequest`."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import ModelInfo
from engine.text.io_processor import InputOutputProcessor
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.errors import BadRequest
from server.request_builder import sampling_params
from server.schemas.body import parse_object, validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest

_TOKENIZER = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
PROCESSOR = InputOutputProcessor(
    _TOKENIZER, None, ModelInfo("", "", "", "", 0, _TOKENIZER.vocab_size, 100, [], 16, 10)
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "robot"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES | VALUES, "content": VALUES}), max_size=2)


def fields_of(model: type[CompletionRequest] | type[ChatCompletionRequest]) -> st.SearchStrategy[dict[str, Any]]:
    """A request that may be valid, with some of its fields set to anything."""
    right = {"model": "m", "prompt": "Hi"} if model is CompletionRequest else {"model": "m"}
    messages = st.fixed_dictionaries({"messages": MESSAGES}) if model is ChatCompletionRequest else st.just({})
    anything = st.dictionaries(st.sampled_from(sorted(model.model_fields)) | st.text(), VALUES, max_size=3)
    return st.builds(lambda first, second: {**right, **first, **second}, messages, anything)


def refused_at_worst(read: Callable[[], object]) -> None:
    """Run `read`, which may raise `BadRequest`, whose body must then be JSON."""
    try:
        read()
    except BadRequest as error:
        json.loads(error.body())


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    refused_at_worst(lambda: parse_object(body).items())


@given(fields_of(CompletionRequest), st.booleans())
def test_any_completion_fields_become_parameters_or_are_refused(data: dict[str, Any], allow_unknown: bool) -> None:
    def read() -> None:
        request = validate(data, CompletionRequest, allow_unknown=allow_unknown)
        sampling_params(request, request.max_tokens, request.alternatives, request.prompt_logprobs, PROCESSOR)

    refused_at_worst(read)


@given(fields_of(ChatCompletionRequest), st.booleans())
def test_any_chat_fields_become_parameters_or_are_refused(data: dict[str, Any], allow_unknown: bool) -> None:
    def read() -> None:
        request = validate(data, ChatCompletionRequest, allow_unknown=allow_unknown)
        sampling_params(request, request.token_limit or 100, request.alternatives, request.prompt_logprobs, PROCESSOR)
        json.dumps([message.for_template() for message in request.messages])

    refused_at_worst(read)
