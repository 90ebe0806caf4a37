"""`POST /tokenize` and `POST /detokenize`: the tokens of a prompt, without generating."""

from typing import Any

from fastapi import Request, Response

from engine.text.io_processor import InvalidRequest
from engine.text.process_watch import ProcessWatch
from server.endpoints import ENDPOINTS, EndpointFamily
from server.error_answers import refusal
from server.frontend import Frontend
from server.limits.jobs import OwnerJobs
from server.middleware import owner_of
from server.models import Models
from server.request_builder import in_thread, read_request, reading, render_prompt
from server.schemas.body import validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from server.streaming.sse import as_json, encode, in_slices, json_response, while_connected

endpoints = ENDPOINTS.register("tokenize")(EndpointFamily())


@endpoints.post(
    "/tokenize",
    TokenizeAnswer,
    request=TokenizeRequest,
    example={"prompt": "Hello, world!", "return_token_strs": True},
)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text or a chat."""
    models = Models.of(http.app)
    async with (
        reading(http, TokenizeRequest, models.config.server_config) as request,
        while_connected(http.receive),
        models.use(request.model, owner_of(http.scope)) as frontend,
    ):
        template = request.chat_template
        # A million tokens, with their texts, take 84 ms to encode.
        content = await in_thread(
            _jobs(http), template, lambda watch: encode(in_slices(_tokenize(request, frontend, watch)))
        )
    return json_response(content)


@endpoints.post("/detokenize", DetokenizeAnswer, request=DetokenizeRequest, example={"tokens": [1, 2, 3]})
async def detokenize(http: Request) -> Response:
    """Return the text of token ids."""
    models = Models.of(http.app)
    request = await read_request(http, DetokenizeRequest, models.config.server_config)
    async with while_connected(http.receive), models.use(request.model, owner_of(http.scope)) as frontend:
        processor = frontend.loaded.processor
        text = await _jobs(http).text(lambda: processor.detokenize(request.tokens))
    return as_json(DetokenizeAnswer(text))


def _jobs(http: Request) -> OwnerJobs:
    return Models.of(http.app).shared.jobs.of(owner_of(http.scope))


def _tokenize(request: TokenizeRequest, frontend: Frontend, watch: ProcessWatch) -> TokenizeAnswer:
    model = frontend.loaded
    processor = model.processor
    is_chat = request.messages is not None
    text = render_prompt(_as_chat(request, frontend), model, frontend, watch) if is_chat else request.prompt or ""
    special = not is_chat if request.add_special_tokens is None else request.add_special_tokens
    try:
        tokens = processor.tokenize(text, special)
    except InvalidRequest as error:
        raise refusal(error, param="messages" if is_chat else "prompt") from error
    spelled = [processor.tokenizer.token(token) or "" for token in tokens] if request.return_token_strs else None
    return TokenizeAnswer(len(tokens), model.max_model_len, tokens, spelled)


def _as_chat(request: TokenizeRequest, frontend: Frontend) -> ChatCompletionRequest:
    """Return a chat request with the same prompt, for the same validation."""
    shared = request.model_fields_set & ChatCompletionRequest.model_fields.keys()
    fields: dict[str, Any] = {name: getattr(request, name) for name in shared if getattr(request, name) is not None}
    fields["model"] = frontend.model_names[0]
    return validate(fields, ChatCompletionRequest, allow_unknown=False)
