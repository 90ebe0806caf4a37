"""`/v1/responses`: create, retrieve, delete, cancel, and list the input items."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from server import frontend as frontends
from server.errors import BadRequest
from server.frontend import Frontend
from server.middleware import owner_of
from server.openapi import answers, generates, reads
from server.request_builder import PreparedChat
from server.responses import service as services
from server.responses.conversion import prepare
from server.responses.rendering import ResponsesRenderer
from server.responses.service import ResponsesService
from server.responses.store import EventLog, StoredResponse, Turn, kept_items
from server.schemas.body import as_json, read_request
from server.schemas.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from server.streaming.generation import Generation
from server.streaming.sse import EventStream

router = APIRouter()

_DEFAULT_PAGE, _LARGEST_PAGE = 20, 100
_LARGEST_NUMBER = 2**31 - 1


def _query(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A parameter as the API's description shows it."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


_RETRIEVED_HOW = {
    "parameters": [
        _query("stream", "Answer with the events of a background response that is streamed.", type="boolean"),
        _query(
            "starting_after",
            "With `stream`: begin behind the event of this sequence number.",
            type="integer",
            minimum=0,
            maximum=_LARGEST_NUMBER,
        ),
    ]
}
_LISTED_HOW = {
    "parameters": [
        _query(
            "limit", "Most items to list.", type="integer", minimum=1, maximum=_LARGEST_PAGE, default=_DEFAULT_PAGE
        ),
        _query("order", "Oldest first, or newest first.", type="string", enum=["asc", "desc"], default="desc"),
        _query("after", "Id of the item to go on behind.", type="string"),
    ]
}


@router.post("/v1/responses", **generates(ResponsesRequest, ResponseObject))
async def create_response(http: Request) -> Response:
    """Answer the next turn of a conversation."""
    arrival_time = time.monotonic()
    frontend, service, owner = frontends.of(http), services.of(http), owner_of(http)
    with frontend.admission.arriving():
        request = await read_request(http, ResponsesRequest, frontend.config.server_config)
        _ = frontend.processor
        frontend.admission.check(owner, 1)
        turn, chat = await _prepared(request, frontend, service, owner)

        def keep(response: ResponseObject) -> None:
            if request.store:
                service.keep(response, owner, turn)

        params, tokenizer = chat.request.sampling_params, frontend.processor.tokenizer
        renderer = ResponsesRenderer(request, params, tokenizer, frontend.fingerprint, chat.new_parser(), keep)
        generation = Generation(
            frontend,
            [chat.request],
            1,
            arrival_time,
            chat.visible_token_ids,
            owner=owner,
            timeout=request.timeout,
        )
    if not request.background:
        return await generation.respond(http, renderer, stream=request.stream)
    log = EventLog() if request.stream else None
    service.start(renderer, generation.events(renderer), generation.end, owner, turn, log)
    return _json(renderer.snapshot()) if log is None else EventStream(log.follow(0))


@router.post("/v1/responses/input_tokens", **answers(InputTokens), **reads(InputTokensRequest))
async def count_input_tokens(http: Request) -> Response:
    """What the prompt of a response would cost."""
    frontend = frontends.of(http)
    request = await read_request(http, InputTokensRequest, frontend.config.server_config)
    request.model = request.model or frontend.model_names[0]
    _, chat = await _prepared(request, frontend, services.of(http), owner_of(http))
    return as_json(InputTokens(len(chat.request.prompt_token_ids)))


async def _prepared(
    request: ResponsesRequest, frontend: Frontend, service: ResponsesService, owner: object
) -> tuple[Turn, PreparedChat]:
    """The turn of a conversation that `request` asks for, and what runs for it. Raises `BadRequest`."""
    _ = frontend.processor
    frontend.check_model(request.model)
    store, id = service.store, request.previous_response_id
    previous = None if id is None else store.previous_turn(id, owner)
    turn = Turn(previous, kept_items(request.input, lambda id: store.item(id, owner)))
    return turn, await prepare(request, turn.context(), frontend)


@router.head("/v1/responses/{response_id}", include_in_schema=False)
@router.get("/v1/responses/{response_id}", **answers(ResponseObject), openapi_extra=_RETRIEVED_HOW)
async def retrieve_response(http: Request, response_id: str) -> Response:
    """A stored response as it stands."""
    stored = _stored(http, response_id)
    start = 0
    if "starting_after" in http.query_params:
        start = _integer(http, "starting_after", 0, low=0, high=_LARGEST_NUMBER) + 1
    if not _boolean(http, "stream"):
        if start:
            raise BadRequest("starting_after is set; it needs stream to be true", param="starting_after")
        return _json(stored.body())
    if stored.events is None:
        raise BadRequest(
            f"stream is true, but response {response_id[:80]!r} has no events to stream; only those of background "
            "responses that were created with stream are kept",
            param="stream",
        )
    return EventStream(stored.events.follow(start))


@router.delete("/v1/responses/{response_id}", **answers(DeletedResponse))
async def delete_response(http: Request, response_id: str) -> Response:
    """Forget a stored response; one that is running ends. What went on from it stays as it is."""
    service = _serving(http)
    service.cancel(service.store.delete(response_id, owner_of(http)))
    return as_json(DeletedResponse(response_id))


@router.post("/v1/responses/{response_id}/cancel", **answers(ResponseObject))
async def cancel_response(http: Request, response_id: str) -> Response:
    """End a background response; one that has ended is answered as it is."""
    stored = _stored(http, response_id)
    if not stored.is_background:
        raise BadRequest(
            f"response {response_id[:80]!r} was not created with background true; only one that was can be cancelled"
        )
    services.of(http).cancel(stored)
    return _json(stored.body())


@router.get("/v1/responses/{response_id}/input_items", **answers(ItemList), openapi_extra=_LISTED_HOW)
async def list_input_items(http: Request, response_id: str) -> Response:
    """What a stored response answers: its input, behind that and the output of the turns before it."""
    stored = _stored(http, response_id)
    limit = _integer(http, "limit", _DEFAULT_PAGE, low=1, high=_LARGEST_PAGE)
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order[:60]!r}; it must be 'asc' or 'desc'", param="order")
    items = stored.turn.context()
    if order == "desc":
        items.reverse()
    if (after := http.query_params.get("after")) is not None:
        place = next((index for index, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise BadRequest(f"after is {after[:60]!r}, which is no item of this response", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = (page[0].id, page[-1].id) if page else (None, None)
    listed = ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > limit)
    return as_json(listed)


def _stored(http: Request, id: str) -> StoredResponse:
    return _serving(http).store.get(id, owner_of(http))


def _serving(http: Request) -> ResponsesService:
    """The service. Raises `NotReady` unless requests can be served."""
    frontend: Frontend = frontends.of(http)
    _ = frontend.processor
    return services.of(http)


def _integer(http: Request, name: str, default: int, *, low: int, high: int) -> int:
    text = http.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
        raise BadRequest(f"{name} is {text[:60]!r}; it must be an integer between {low} and {high}", param=name)
    return int(text)


def _boolean(http: Request, name: str) -> bool:
    text = http.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name} is {text[:60]!r}; it must be true or false", param=name)
    return text in ("true", "1")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
