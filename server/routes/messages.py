"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API."""

import re
import time

from fastapi import Request, Response

from server.anthropic.conversion import count_tokens, prepare, wants_cache
from server.anthropic.rendering import MessagesRenderer
from server.endpoints import ENDPOINTS, EndpointFamily
from server.errors import AnthropicError, BadRequest
from server.middleware import owner_of
from server.models import Models
from server.request_builder import accept, chat_sequences, drop_input, reading
from server.schemas.messages import CountTokensRequest, MessageAnswer, MessagesRequest, TokenCount
from server.streaming.generation import Generation
from server.streaming.sse import as_json, while_connected

endpoints = ENDPOINTS.register("messages")(EndpointFamily(AnthropicError))

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 32,
}


@endpoints.post("/v1/messages", MessageAnswer, request=MessagesRequest, example=_EXAMPLE, streams=True)
async def create_message(http: Request) -> Response:
    """Answer a conversation of Anthropic's Messages API."""
    arrival_time = time.monotonic()
    _check_version(http)
    async with accept(http, MessagesRequest) as (request, frontend, owner):
        frontend.admission.precheck(owner, 1)
        chat, prepared = await prepare(request, frontend, owner, frontend.seal.opener(owner.key))
        sequences = chat_sequences(chat, prepared, frontend, owner, arrival_time)
        drop_input(chat)
        prompt, config = prepared.prompt, frontend.config
        reports_created = config.enable_prefix_caching and wants_cache(request)
        renderer = MessagesRenderer(
            request,
            len(prompt.token_ids),
            frontend.fingerprint,
            prepared.new_parser(),
            frontend.seal.sealer(owner.key),
            is_clipped=prompt.max_tokens < prompt.params.max_tokens,
            cache_block_size=config.kv_cache_block_size if reports_created else None,
            request_id=http.scope["state"].get("request_id"),
        )
        generation = Generation(frontend.hub, config, sequences, 1, owner=owner, timeout=request.timeout)
    return await generation.respond(http, renderer, stream=request.stream)


@endpoints.post(
    "/v1/messages/count_tokens",
    TokenCount,
    request=CountTokensRequest,
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}]},
)
async def count_message_tokens(http: Request) -> Response:
    """Count the tokens of a message's prompt."""
    _check_version(http)
    models, owner = Models.of(http.app), owner_of(http.scope)
    opener = models.shared.seal.opener(owner.key)
    async with (
        reading(http, CountTokensRequest, models.config.server_config) as request,
        while_connected(http.receive),
        models.use(request.model, owner) as frontend,
    ):
        return as_json(TokenCount(await count_tokens(request, frontend, owner, opener)))


def _check_version(http: Request) -> None:
    """Refuse a header that is not a version of the API. All versions, and no header, are answered alike."""
    version = http.headers.get("anthropic-version")
    if version is not None and not _VERSION.fullmatch(version):
        raise BadRequest(f"anthropic-version is {version[:60]!r}; it must be a date, such as 2023-06-01")
