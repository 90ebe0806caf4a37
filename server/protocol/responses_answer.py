"""`/v1/responses`: the answers, whole. Items: `responses_items`; events: `server.rendering.response_items`."""

from typing import Any, Literal, TypeAlias

import msgspec

from engine.sampling_params import SamplingParams
from server.protocol.responses import ResponsesRequest
from server.protocol.responses_items import OutputItem


class InputTokens(msgspec.Struct):
    """Answer to `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseUsageInput(msgspec.Struct):
    cached_tokens: int
    """Input tokens whose KV came from the prefix cache."""
    cache_write_tokens: int = 0


class ResponseUsageOutput(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens that a response read and wrote."""

    input_tokens: int
    input_tokens_details: ResponseUsageInput
    output_tokens: int
    output_tokens_details: ResponseUsageOutput
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct):
    message: str
    code: Literal["server_error"] = "server_error"


ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/responses` and `GET /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since the epoch, as `completed_at`."""
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct):
    """Answer to `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def new_response(request: ResponsesRequest, params: SamplingParams, id: str, created_at: int) -> ResponseObject:
    """A response that has not begun: what `request` asked for, and what `params` made of it."""
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in request.tools
    ]
    choice = request.tool_choice
    form = request.text.format
    return ResponseObject(
        id=id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=request.background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        safety_identifier=request.safety_identifier,
        store=request.store,
        temperature=params.temperature,
        text={
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True),
            "verbosity": "medium",
        },
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=tools,
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p if request.top_p is None else request.top_p,
        truncation=request.truncation,
        user=request.user,
    )
