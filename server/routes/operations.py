"""Calls for operators, with keys of the scope admin: owners, LoRA adapters, sleep, weights and settings.

Those of adapters and of sleep are vLLM's. `/kaon/limits`, for any key, reports the use and the limits of its owner.
"""

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from server.endpoints import ENDPOINTS, EndpointFamily, query_integer, query_parameter
from server.errors import BadRequest
from server.frontend import Frontend
from server.middleware import owner_of
from server.models import Models
from server.request_builder import read_request
from server.schemas.operations import (
    LoadAdapterRequest,
    OwnerLimits,
    OwnerList,
    OwnerUse,
    QuotaView,
    ReloadResult,
    SleepState,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
    WeightsUpdated,
)
from server.streaming.sse import as_json

endpoints = ENDPOINTS.register("operations")(EndpointFamily())

_MOST_LISTED = 1000

# -- owners -----------------------------------------------------------------------------------------------------


@endpoints.get("/kaon/limits", OwnerLimits, scope=None)
async def limits(http: Request) -> Response:
    """Return the caller's present use, total use and limits."""
    shared, owner = Models.of(http.app).shared, owner_of(http.scope)
    accounts, quotas, settings = shared.accounts, shared.quotas, shared.reloader.settings
    return as_json(
        OwnerLimits(
            name=owner.name,
            scopes=sorted(owner.scopes),
            group=owner.group,
            weight=owner.weight,
            in_use=accounts.of_owner(owner.party),
            used=accounts.tally(owner).counts(),
            quotas={kind: QuotaView(*state) for kind, state in quotas.states(owner).items()},
            most={
                "requests": settings.max_requests_per_key,
                "background_responses": settings.most_background_responses_per_key,
            },
        )
    )


@endpoints.get("/kaon/owners", OwnerList, scope="admin")
async def owners(http: Request) -> Response:
    """Return the present and total use of each owner. Needs a key of the scope admin."""
    accounts = Models.of(http.app).shared.accounts
    tallies = sorted(accounts.tallies(), key=lambda tally: tally.requests, reverse=True)
    data = [
        OwnerUse(
            name=tally.owner.name,
            key=tally.owner.key and tally.owner.key[:12],
            in_use=accounts.of_owner(tally.owner.party),
            used=tally.counts(),
        )
        for tally in tallies[:_MOST_LISTED]
    ]
    return as_json(OwnerList(data=data, has_more=len(tallies) > _MOST_LISTED))


# -- LoRA adapters ----------------------------------------------------------------------------------------------

_ADAPTER = {"lora_name": "sql", "lora_path": "/adapters/sql"}


@endpoints.post("/v1/load_lora_adapter", "text/plain", request=LoadAdapterRequest, example=_ADAPTER, scope="admin")
async def load(http: Request) -> Response:
    """Load a LoRA adapter, which requests may name as `model` from then on. Needs a key of the scope admin."""
    models = Models.of(http.app)
    request = await read_request(http, LoadAdapterRequest, models.config.server_config)
    async with models.use(models.chosen(request.model).model_names[0], owner_of(http.scope)) as frontend:
        await frontend.adapters.load(request.lora_name, request.lora_path, in_place=request.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


@endpoints.post(
    "/v1/unload_lora_adapter",
    "text/plain",
    request=UnloadAdapterRequest,
    example={"lora_name": "sql"},
    scope="admin",
)
async def unload(http: Request) -> Response:
    """Unload a LoRA adapter. New requests for it get a 404 at once; the call returns when its last live request has
    ended. Needs a key of the scope admin."""
    models = Models.of(http.app)
    request = await read_request(http, UnloadAdapterRequest, models.config.server_config)
    models.check_open()
    owning = (each for each in models.frontends if each.adapters.number_of(request.lora_name))
    await next(owning, models.named(None)).adapters.unload(request.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


# -- the engine and the settings --------------------------------------------------------------------------------

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
