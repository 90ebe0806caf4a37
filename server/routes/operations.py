"""`/sleep`, `/wake_up` and `/is_sleeping`, as vLLM has them, and `/kaon/reload`: for keys of the scope admin."""

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from server.endpoints import ENDPOINTS, EndpointFamily, query_integer, query_parameter
from server.errors import BadRequest
from server.frontend import Frontend, owner_of
from server.models import Models
from server.request_builder import read_request
from server.schemas.body import as_json
from server.schemas.operations import ReloadResult, SleepState, UpdateWeightsRequest, WeightsUpdated

endpoints = ENDPOINTS.register("operations")(EndpointFamily())

_LEVEL = query_parameter(
    "level",
    "1 frees the KV cache and keeps the weights in the host's memory, 2 frees both.",
    type="integer",
    enum=[1, 2],
    default=1,
)


_MODEL = query_parameter("model", "Which model; needed only where the server has several.", type="string")


@endpoints.post("/sleep", "text/plain", parameters=[_LEVEL, _MODEL], scope="admin")
async def sleep(http: Request) -> Response:
    """Free the engine's memory until `/wake_up`. Live requests pause, new ones get a 503. Needs a key of the scope
    admin."""
    _refuse_others(http, "level", "model")
    await _frontend(http).sleep(query_integer(http, "level", 1, low=1, high=2))
    return PlainTextResponse("")


@endpoints.post("/wake_up", "text/plain", parameters=[_MODEL], scope="admin")
async def wake_up(http: Request) -> Response:
    """Continue the paused requests, and accept new ones. Needs a key of the scope admin."""
    _refuse_others(http, "model")
    await _frontend(http).wake_up()
    return PlainTextResponse("")


@endpoints.get("/is_sleeping", SleepState, parameters=[_MODEL], scope="admin")
async def is_sleeping(http: Request) -> Response:
    """Return whether the server sleeps. Needs a key of the scope admin."""
    return as_json(SleepState(_frontend(http).is_asleep))


@endpoints.post(
    "/update_weights",
    WeightsUpdated,
    request=UpdateWeightsRequest,
    example={"model_path": "/weights/step-200"},
    scope="admin",
)
async def update_weights(http: Request) -> Response:
    """Replace the weights by others of the same model. Streams continue with the new weights; if these cannot be
    served, the present ones stay. Needs a key of the scope admin."""
    models = Models.of(http.app)
    request = await read_request(http, UpdateWeightsRequest, models.config.server_config)
    async with models.use(models.chosen(request.model).model_names[0], owner_of(http.scope)) as frontend:
        alongside = False if models.has_budget and request.alongside is None else request.alongside
        path = await frontend.update_weights(request.model_path, alongside=alongside)
    return as_json(WeightsUpdated(model_path=str(path)))


@endpoints.post("/kaon/reload", ReloadResult, scope="admin")
async def reload(http: Request) -> Response:
    """Read the settings again, as SIGHUP does, and apply those that may change while the server runs. Needs a key of
    the scope admin."""
    _refuse_others(http)
    try:
        reloaded = Models.of(http.app).shared.reloader.reload()
    except ValueError as error:
        raise BadRequest(f"the settings stay as they are: {error}") from error
    return as_json(ReloadResult(changed=reloaded.changed, need_restart=reloaded.need_restart))


def _frontend(http: Request) -> Frontend:
    """Return the front end of the model that the query names. Raises `ModelNotFound`, `BadRequest`."""
    return Models.of(http.app).chosen(http.query_params.get("model"))


def _refuse_others(http: Request, *known: str) -> None:
    """Raise `BadRequest` for an unknown query parameter: other servers have parameters that change the call's
    effect."""
    for name in http.query_params:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no parameters"
            raise BadRequest(f"{name[:60]} is not a parameter of {http.url.path}; {takes}", param=name[:60])
