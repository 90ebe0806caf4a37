"""`GET /v1/models` and `GET /v1/models/{id}`, in OpenAI's form, or in Anthropic's for Anthropic's clients."""

from datetime import UTC, datetime

from fastapi import Request, Response

from server.endpoints import ENDPOINTS, EndpointFamily
from server.errors import BadRequest, speaks_anthropic
from server.frontend import Frontend
from server.schemas.body import as_json
from server.schemas.models import Model, ModelInfo, ModelInfoPage, ModelList

endpoints = ENDPOINTS.register("models")(EndpointFamily())

_MAX_PAGE = 1000


@endpoints.get("/v1/models", ModelList)
async def list_models(http: Request) -> Response:
    """The names under which the model is served."""
    frontend = Frontend.of(http.app)
    if speaks_anthropic(http.scope):
        return as_json(_page(http, [_model_info(name, frontend) for name in frontend.model_names]))
    return as_json(ModelList(data=[_model(name, frontend) for name in frontend.model_names]))


@endpoints.get("/v1/models/{model:path}", Model)
async def retrieve_model(http: Request, model: str) -> Response:
    """One of these names."""
    frontend = Frontend.of(http.app)
    frontend.check_model(model)
    return as_json((_model_info if speaks_anthropic(http.scope) else _model)(model, frontend))


def _model(name: str, frontend: Frontend) -> Model:
    parent = frontend.model_names[0] if frontend.adapter_of(name) else None
    return Model(id=name, created=frontend.created, max_model_len=frontend.max_model_len, parent=parent)


def _model_info(name: str, frontend: Frontend) -> ModelInfo:
    length = frontend.max_model_len
    created = datetime.fromtimestamp(frontend.created, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=length, max_tokens=length)


def _page(http: Request, models: list[ModelInfo]) -> ModelInfoPage:
    """The models that the query asks for: at most `limit`, after or before the model of an id."""
    query, ids = http.query_params, [model.id for model in models]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= _MAX_PAGE):
        raise BadRequest(f"limit is {limit[:60]!r}; it must be an integer between 1 and {_MAX_PAGE}")
    first, last = 0, len(models)
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise BadRequest(f"{name} is {query[name][:60]!r}, which is no model of this server")
    if "after_id" in query:
        first = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        last = ids.index(query["before_id"])
        first = max(first, last - int(limit))
    page = models[first:last][: int(limit)]
    has_more = first > 0 if "before_id" in query else first + len(page) < last
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return ModelInfoPage(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1])
