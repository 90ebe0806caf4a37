"""`GET /v1/models` and `GET /v1/models/{id}`."""

from fastapi import Request, Response

from server.endpoints import ENDPOINTS, EndpointFamily
from server.frontend import Frontend
from server.schemas.body import as_json
from server.schemas.models import Model, ModelList

endpoints = ENDPOINTS.register("models")(EndpointFamily())


@endpoints.get("/v1/models", ModelList)
async def list_models(http: Request) -> Response:
    """The names under which the model is served."""
    frontend = Frontend.of(http.app)
    return as_json(ModelList(data=[_model(name, frontend) for name in frontend.model_names]))


@endpoints.get("/v1/models/{model:path}", Model)
async def retrieve_model(http: Request, model: str) -> Response:
    """One of these names."""
    frontend = Frontend.of(http.app)
    frontend.check_model(model)
    return as_json(_model(model, frontend))


def _model(name: str, frontend: Frontend) -> Model:
    parent = frontend.model_names[0] if frontend.adapter_of(name) else None
    return Model(id=name, created=frontend.created, max_model_len=frontend.max_model_len, parent=parent)
