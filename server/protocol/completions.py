"""`/v1/completions`: the request, and the answer whole. Chunks of a stream are written by `server.sse`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import PlainValidator

from server.protocol.common import INT31, Logprobs, SamplingFields, Usage
from server.protocol.rules import MAX_ITEMS, Between, Unsupported, rule

Prompt: TypeAlias = str | list[int]


def _to_prompts(value: Any) -> list[Prompt]:
    """Each prompt apart. A list of integers is one prompt, any other list holds several."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise rule("it must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise rule("it must hold at least 1 prompt or token id")
    if _is_token_ids(value):
        return [value]
    if len(value) > MAX_ITEMS:
        raise rule(f"it may hold at most {MAX_ITEMS} prompts, and holds {len(value)} items")
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _is_token_ids(item)):
            raise rule(f"its item {index} must be a string or a list of token ids like its neighbours")
    return value


def _is_token_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(_to_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    """One prompt or several, each as text or as token ids."""

    max_tokens: Annotated[int, Between(1, INT31)] = 16
    """Most tokens to generate."""

    logprobs: Logprobs | None = None
    """Report the log probability of each token and of this many likeliest alternatives."""

    echo: bool = False
    """Begin the text with the prompt; not together with `logprobs`."""

    add_special_tokens: bool = True
    """Put around a text prompt what the model's tokenizer puts there, such as BOS."""

    best_of: Annotated[int, Between(1, INT31)] | None = None
    """Only the value of `n` is supported."""

    suffix: Unsupported = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where in `text` each token begins, in characters."""


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
