"""`/v1/responses`: create, retrieve, delete and cancel responses, list their input items, count input tokens."""

import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from fastapi import Request, Response

from server.endpoints import ENDPOINTS, ORDER, EndpointFamily, is_newest_first, query_integer, query_parameter
from server.errors import ApiError, BadRequest
from server.frontend import Frontend
from server.limits.owners import Owner
from server.middleware import owner_of
from server.models import Models
from server.request_builder import PreparedChat, accept, chat_sequences, reading
from server.responses.conversion import prepare, retained_messages
from server.responses.rendering import CompactionRenderer, ResponsesRenderer, failed_stream
from server.responses.service import ResponsesService
from server.responses.store import EventLog, StoredResponse, Turn, stored_items
from server.responses.tools import ToolTable
from server.schemas.response_objects import CompactedResponse, DeletedResponse, InputTokens, ItemList, ResponseObject
from server.schemas.responses import CompactRequest, InputReference, InputTokensRequest, ResponsesRequest
from server.streaming.generation import Generation
from server.streaming.sse import EventStream, as_json, json_response, while_connected

endpoints = ENDPOINTS.register("responses")(EndpointFamily())

_DEFAULT_PAGE, _MAX_PAGE = 20, 100
_MAX_NUMBER = 2**31 - 1


_RETRIEVE_PARAMETERS = [
    query_parameter("stream", "Answer with the events of a background response that is streamed.", type="boolean"),
    query_parameter(
        "starting_after",
        "With `stream`: begin after the event of this sequence number.",
        type="integer",
        minimum=0,
        maximum=_MAX_NUMBER,
    ),
]
_LIST_PARAMETERS = [
    query_parameter(
        "limit", "Most items to list.", type="integer", minimum=1, maximum=_MAX_PAGE, default=_DEFAULT_PAGE
    ),
    ORDER,
    query_parameter("after", "Id of the item after which the list begins.", type="string"),
]
_EXAMPLE = {"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 32}


class _Answer(NamedTuple):
    """A response that is ready to run."""

    turn: Turn
    renderer: ResponsesRenderer
    generation: Generation


@endpoints.post("/v1/responses", ResponseObject, request=ResponsesRequest, example=_EXAMPLE, streams=True)
async def create_response(http: Request) -> Response:
    """Answer the next turn of a conversation."""
    arrival_time = time.monotonic()
    service = ResponsesService.of(http.app)
    request: ResponsesRequest | None = None
    try:
        async with accept(http, ResponsesRequest) as (request, frontend, owner):
            answer = await _prepare_answer(request, frontend, service, owner, arrival_time)
        if not request.background:
            return await answer.generation.respond(http, answer.renderer, stream=request.stream)
        log = EventLog() if request.stream else None
        renderer, generation = answer.renderer, answer.generation
        service.start(renderer, generation.events(renderer), generation.end, owner, answer.turn, log)
        if log is None:
            return json_response(*renderer.snapshot())
        return EventStream(service.follow(log, 0, owner))
    except ApiError as error:
        if request is None or not request.stream or not _is_read_as_event(http, error):
            raise
        return EventStream(_only(failed_stream(request, error)))


_EVENT_CODES = ("context_length_exceeded", "rate_limit_exceeded")


def _is_read_as_event(http: Request, error: ApiError) -> bool:
    """Return whether the client handles `error` only as the event `response.failed`, and fails at an HTTP error.

    Codex compacts a conversation that is too long, and retries if the server is full, only after this event.
    """
    return error.code in _EVENT_CODES and http.headers.get("originator", "").startswith("codex")


async def _only(events: bytes) -> AsyncGenerator[bytes, None]:
    yield events


@endpoints.post(
    "/v1/responses/compact",
    CompactedResponse,
    request=CompactRequest,
    example={"input": [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5."}]},
)
async def compact_response(http: Request) -> Response:
    """Replace a conversation by its newest user messages and one item with a summary, which the model writes."""
    arrival_time = time.monotonic()
    service = ResponsesService.of(http.app)
    async with accept(http, CompactRequest) as (request, frontend, owner):
        request.store = False
        answer = await _prepare_answer(request, frontend, service, owner, arrival_time)
        items, most = answer.turn.context(), frontend.loaded.max_model_len
    renderer = CompactionRenderer(answer.renderer, retained_messages(items, most * _CHARACTERS_OF_TOKEN // 4))
    return await answer.generation.respond(http, renderer, stream=False)


_CHARACTERS_OF_TOKEN = 4
_QUICKLY_CONVERTED_ITEMS = 64
"""More items are converted in a thread: 2000 of them take 59 ms."""


async def _prepare_answer(
    request: ResponsesRequest, frontend: Frontend, service: ResponsesService, owner: Owner, arrival_time: float
) -> _Answer:
    """Prepare the chat, the sequence and the renderer. Raises `BadRequest`, `NotReady` and `Overloaded`."""
    frontend.admission.precheck(owner, 1)
    turn, tools, chat = await _prepare(request, frontend, service, owner)
    keep = service.keeper(owner, turn) if request.store else _drop
    sequences = chat_sequences(request, chat, frontend, owner, arrival_time)
    params, tokenizer = chat.prompt.params, frontend.loaded.processor.tokenizer
    seal = frontend.seal.sealer(owner.key)
    parser = chat.new_parser()
    renderer = ResponsesRenderer(request, params, tokenizer, frontend.fingerprint, parser, tools, seal, keep)
    generation = Generation(frontend.hub, frontend.config, sequences, 1, owner=owner, timeout=request.timeout)
    return _Answer(turn, renderer, generation)


def _drop(response: ResponseObject) -> None:
    pass


@endpoints.post(
    "/v1/responses/input_tokens",
    InputTokens,
    request=InputTokensRequest,
    example={"input": "What is the capital of France?"},
)
async def count_input_tokens(http: Request) -> Response:
    """Count the tokens of a response's prompt."""
    models, owner = Models.of(http.app), owner_of(http.scope)
    async with reading(http, InputTokensRequest, models.config.server_config) as request:
        request.model = request.model or models.names[0]
        async with while_connected(http.receive), models.use(request.model, owner) as frontend:
            _, _, chat = await _prepare(request, frontend, ResponsesService.of(http.app), owner)
    return as_json(InputTokens(len(chat.prompt.token_ids)))


async def _prepare(
    request: ResponsesRequest, frontend: Frontend, service: ResponsesService, owner: Owner
) -> tuple[Turn, ToolTable, PreparedChat]:
    """Return the turn that `request` adds to its conversation, its tools, and the prepared chat. Raises
    `BadRequest`."""
    store, id = service.store, request.previous_response_id
    previous = None if id is None else store.previous_turn(id, owner)
    # Looked up here, since the store belongs to the event loop.
    referenced = {each.id: store.item(each.id, owner) for each in request.input if isinstance(each, InputReference)}

    def convert() -> Turn:
        return Turn(previous, stored_items(request.input, referenced.get, frontend.max_request_bytes))

    if len(request.input) <= _QUICKLY_CONVERTED_ITEMS:
        turn = convert()
    else:
        turn = await frontend.jobs.of(owner).text(convert, is_large=True)
    tools = ToolTable(request)
    opener = frontend.seal.opener(owner.key)
    return turn, tools, await prepare(request, turn, tools, opener, frontend, owner)


@endpoints.get("/v1/responses/{response_id}", ResponseObject, parameters=_RETRIEVE_PARAMETERS)
async def retrieve_response(http: Request, response_id: str) -> Response:
    """Return a stored response in its present state."""
    stored = _stored(http, response_id)
    start = 0
    if "starting_after" in http.query_params:
        start = query_integer(http, "starting_after", 0, low=0, high=_MAX_NUMBER) + 1
    if not _wants_stream(http):
        if start:
            raise BadRequest("starting_after is set; it needs stream to be true", param="starting_after")
        return json_response(*stored.body())
    if stored.events is None:
        raise BadRequest(
            f"stream is true, but response {response_id[:80]!r} has no events to stream; only those of background "
            "responses that were created with stream are kept",
            param="stream",
        )
    return EventStream(ResponsesService.of(http.app).follow(stored.events, start, owner_of(http.scope)))


@endpoints.delete("/v1/responses/{response_id}", DeletedResponse)
async def delete_response(http: Request, response_id: str) -> Response:
    """Delete a stored response; if it is running, it ends. Responses that continue it are not changed."""
    service = _serving(http)
    service.cancel(service.store.delete(response_id, owner_of(http.scope)))
    return as_json(DeletedResponse(response_id))


@endpoints.post("/v1/responses/{response_id}/cancel", ResponseObject)
async def cancel_response(http: Request, response_id: str) -> Response:
    """Cancel a background response. A response that has ended is returned unchanged."""
    stored = _stored(http, response_id)
    if not stored.is_background:
        raise BadRequest(
            f"response {response_id[:80]!r} was not created with background true; only one that was can be cancelled"
        )
    ResponsesService.of(http.app).cancel(stored)
    return json_response(*stored.body())


@endpoints.get("/v1/responses/{response_id}/input_items", ItemList, parameters=_LIST_PARAMETERS)
async def list_input_items(http: Request, response_id: str) -> Response:
    """List the input of a stored response: its own, and input and output of the earlier turns."""
    stored = _stored(http, response_id)
    limit = query_integer(http, "limit", _DEFAULT_PAGE, low=1, high=_MAX_PAGE)
    newest_first = is_newest_first(http)
    items = stored.turn.context()
    if newest_first:
        items.reverse()
    if (after := http.query_params.get("after")) is not None:
        position = next((index for index, item in enumerate(items) if item.id == after), None)
        if position is None:
            raise BadRequest(f"after is {after[:60]!r}, which is not an item of this response", param="after")
        items = items[position + 1 :]
    page = items[:limit]
    ends = (page[0].id, page[-1].id) if page else (None, None)
    listed = ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > limit)
    return as_json(listed)


def _stored(http: Request, id: str) -> StoredResponse:
    return _serving(http).store.get(id, owner_of(http.scope))


def _serving(http: Request) -> ResponsesService:
    """Return the service. Raises `NotReady` unless requests can be served."""
    Models.of(http.app).check_open()
    return ResponsesService.of(http.app)


def _wants_stream(http: Request) -> bool:
    """Parse the query parameter `stream`. Raises `BadRequest`."""
    text = http.query_params.get("stream", "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise BadRequest(f"stream is {text[:60]!r}; it must be true or false", param="stream")
    return text in ("true", "1")
