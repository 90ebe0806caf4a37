"""`POST /v1/chat/completions`."""

import asyncio
import time

from fastapi import APIRouter, Request, Response

from engine.io_processor import InputOutputProcessor, InvalidRequest
from engine.messages import AddRequest
from server import frontend as frontends
from server.errors import BadRequest
from server.generation import Generation, check_limits
from server.openapi import generates
from server.parsing import read_request
from server.protocol.chat import ChatCompletion, ChatCompletionRequest
from server.protocol.common import INT31
from server.rendering.chat import ChatRenderer

router = APIRouter()


@router.post("/v1/chat/completions", **generates(ChatCompletionRequest, ChatCompletion))
async def create_chat_completion(http: Request) -> Response:
    """Answer a chat."""
    arrival_time = time.monotonic()
    frontend = frontends.of(http)
    request = await read_request(http, ChatCompletionRequest, frontend.config.server_config)
    processor = frontend.processor
    frontend.check_model(request.model)
    check_limits(request, 1, frontend)
    prompt = await asyncio.to_thread(_preprocess, request, processor)
    renderer = ChatRenderer(request, processor.tokenizer, frontend.fingerprint)
    generation = Generation(frontend, [prompt], request.n, arrival_time)
    return await generation.respond(http, renderer, stream=request.stream)


def _preprocess(request: ChatCompletionRequest, processor: InputOutputProcessor) -> AddRequest:
    """The engine request, rendered by the model's template and checked against its limits."""
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools] if request.tool_choice != "none" else []
    params = request.sampling_params(request.token_limit or INT31, request.alternatives)
    try:
        token_ids = processor.tokenize_chat(
            [message.for_template() for message in request.messages],
            tools or None,
            request.add_generation_prompt,
            **request.chat_template_kwargs,
        )
        return processor.preprocess(
            token_ids,
            params,
            request_id=0,
            cache_salt=request.salt_key,
            clip_max_tokens=request.token_limit is None,
        )
    except InvalidRequest as error:
        raise _in_chat_terms(error, request) from error


def _in_chat_terms(error: InvalidRequest, request: ChatCompletionRequest) -> BadRequest:
    """`error` with the names that its fields have in this endpoint."""
    if error.param == "prompt":
        return BadRequest(f"messages are not accepted: their {error}", param="messages")
    if error.param == "max_tokens" and request.max_completion_tokens is not None:
        renamed = str(error).replace("max_tokens", "max_completion_tokens")
        return BadRequest(renamed, param="max_completion_tokens")
    return BadRequest(str(error), param=error.param)
