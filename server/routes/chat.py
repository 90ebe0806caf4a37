"""`POST /v1/chat/completions`."""

import time

from fastapi import APIRouter, Request, Response

from server import frontend as frontends
from server.chat_preparation import prepare_chat
from server.generation import Generation
from server.limits import check_limits
from server.middleware.keys import owner_of
from server.openapi import generates
from server.parsing import read_request
from server.protocol.chat import ChatCompletion, ChatCompletionRequest
from server.rendering.chat import ChatRenderer

router = APIRouter()


@router.post("/v1/chat/completions", **generates(ChatCompletionRequest, ChatCompletion))
async def create_chat_completion(http: Request) -> Response:
    """Answer a chat."""
    arrival_time = time.monotonic()
    frontend, owner = frontends.of(http), owner_of(http)
    with frontend.admission.arriving():
        request = await read_request(http, ChatCompletionRequest, frontend.config.server_config)
        processor = frontend.processor
        frontend.check_model(request.model)
        check_limits(request, 1, frontend)
        frontend.admission.check(owner, request.n)
        chat = await prepare_chat(request, frontend)
        prompt = chat.request.prompt_token_ids
        renderer = ChatRenderer(request, processor.tokenizer, frontend.fingerprint, chat.new_parser, prompt)
        generation = Generation(
            frontend,
            [chat.request],
            request.n,
            arrival_time,
            chat.visible_token_ids,
            owner=owner,
            timeout=request.timeout,
        )
    return await generation.respond(http, renderer, stream=request.stream)
