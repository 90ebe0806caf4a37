"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them, for keys of the scope admin."""

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from server.endpoints import ENDPOINTS, EndpointFamily
from server.frontend import owner_of
from server.models import Models
from server.request_builder import read_request
from server.schemas.operations import LoadAdapterRequest, UnloadAdapterRequest

endpoints = ENDPOINTS.register("lora")(EndpointFamily())

_EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}


@endpoints.post("/v1/load_lora_adapter", "text/plain", request=LoadAdapterRequest, example=_EXAMPLE, scope="admin")
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
    owning = (each for each in models.all if each.adapters.number_of(request.lora_name))
    await next(owning, models.named(None)).adapters.unload(request.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")
