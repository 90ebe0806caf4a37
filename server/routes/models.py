"""`GET /v1/models` and `GET /v1/models/{id}`, in OpenAI's form, or in Anthropic's for Anthropic's clients."""

from datetime import UTC, datetime

from fastapi import Request, Response

from server.endpoints import ENDPOINTS, EndpointFamily
from server.error_answers import speaks_anthropic
from server.errors import BadRequest
from server.frontend import Frontend
from server.models import Models
from server.schemas.models import (
    CatalogModel,
    Model,
    ModelInfo,
    ModelInfoPage,
    ModelList,
    ReasoningLevel,
    TruncationPolicy,
)
from server.streaming.sse import as_json

endpoints = ENDPOINTS.register("models")(EndpointFamily())

_MAX_PAGE = 1000


@endpoints.get("/v1/models", ModelList)
async def list_models(http: Request) -> Response:
    """List the names of all models and adapters, including models that are not loaded."""
    served = [(name, frontend) for frontend in Models.of(http.app).frontends for name in frontend.model_names]
    if speaks_anthropic(http.scope):
        return as_json(_page(http, [_model_info(*each) for each in served]))
    catalog = [_catalog_model(name, priority, frontend) for priority, (name, frontend) in enumerate(served)]
    return as_json(ModelList(data=[_model(*each) for each in served], models=catalog))


@endpoints.get("/v1/models/{model:path}", Model)
async def retrieve_model(http: Request, model: str) -> Response:
    """Return one model or adapter of the list."""
    frontend = Models.of(http.app).named(model)
    return as_json((_model_info if speaks_anthropic(http.scope) else _model)(model, frontend))


_LEVELS = [
    ReasoningLevel("none", "No reasoning, where the model can do without."),
    ReasoningLevel("low", "Little reasoning."),
    ReasoningLevel("medium", "The model's own measure."),
    ReasoningLevel("high", "More reasoning, where the model knows levels."),
]
_OUTPUT_SHARE = 16
"""One output of a tool may fill 1 / 16 of the context of an agent."""
_MOST_OUTPUT_TOKENS = 10_000


_AGENT_INSTRUCTIONS = """\
You are a coding agent. You work for the user in a directory of their machine, through the tools that you are given.

- Go on until the task is done, or until only the user can decide how to go on. Then stop and say so.
- Look before you change: read the files that matter, and search with `rg` where it is installed. Do not guess what a
  command or a file says.
- Change no more than the task needs, in the style of the code around it. Leave the user's other changes alone. Commit,
  push and delete only when asked to.
- Where there is a tool that edits files, edit with it; run commands for everything else. Quote paths.
- Check what you did: run the tests or the program that your change concerns, and read what they print.
- Follow the instructions in AGENTS.md files of the directories in which you work.
- Before a longer series of calls, say in one sentence what you are about to do. At the end, say briefly what you
  changed, in which files, what you checked, and what is left. Do not show whole files.
"""
"""Short, because served models may have a small context."""


def _catalog_model(name: str, priority: int, frontend: Frontend) -> CatalogModel:
    context = frontend.max_model_len
    limit = _MOST_OUTPUT_TOKENS if context is None else min(_MOST_OUTPUT_TOKENS, context // _OUTPUT_SHARE)
    return CatalogModel(
        slug=name,
        display_name=name,
        description="Served by Kaon.",
        default_reasoning_level="medium" if frontend.reasons else None,
        supported_reasoning_levels=_LEVELS if frontend.reasons else [],
        priority=priority,
        base_instructions=_AGENT_INSTRUCTIONS,
        truncation_policy=TruncationPolicy("tokens", limit),
        context_window=context,
        max_context_window=context,
    )


def _model(name: str, frontend: Frontend) -> Model:
    parent = frontend.model_names[0] if frontend.adapters.number_of(name) else None
    return Model(id=name, created=frontend.created, max_model_len=frontend.max_model_len, parent=parent)


def _model_info(name: str, frontend: Frontend) -> ModelInfo:
    length = frontend.max_model_len
    created = datetime.fromtimestamp(frontend.created, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=length, max_tokens=length)


def _page(http: Request, models: list[ModelInfo]) -> ModelInfoPage:
    """Return the page of models that the query asks for: at most `limit`, after or before the model of an id."""
    query, ids = http.query_params, [model.id for model in models]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= _MAX_PAGE):
        raise BadRequest(f"limit is {limit[:60]!r}; it must be an integer between 1 and {_MAX_PAGE}")
    first, last = 0, len(models)
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise BadRequest(f"{name} is {query[name][:60]!r}, which is not a model of this server")
    if "after_id" in query:
        first = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        last = ids.index(query["before_id"])
        first = max(first, last - int(limit))
    page = models[first:last][: int(limit)]
    has_more = first > 0 if "before_id" in query else first + len(page) < last
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return ModelInfoPage(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1])
