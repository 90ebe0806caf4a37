"""Bodies and answers of the calls for operators: adapters, sleep, weights, reloading, owners and their limits."""

from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, Field

from server.schemas.body import RequestModel, sentence


def _printable(name: str) -> str:
    if not name.isprintable():
        raise sentence("has a line break or another character that cannot be shown; leave it out")
    return name


_Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]


class LoadAdapterRequest(RequestModel):
    """Body of `/v1/load_lora_adapter`, whose fields are vLLM's."""

    lora_name: _Name
    """The name by which requests select it as `model`."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its directory on the server, beneath one of `lora_directories`."""
    model: str | None = None
    """The model that it adapts; needed only where the server has several models."""
    load_inplace: bool = False
    """Replace the adapter of that name, which requests that are running go on to use."""


class UnloadAdapterRequest(RequestModel):
    """Body of `/v1/unload_lora_adapter`, whose fields are vLLM's."""

    lora_name: _Name
    """Its name."""


class SleepState(msgspec.Struct):
    """Answer to `GET /is_sleeping`."""

    is_sleeping: bool


class UpdateWeightsRequest(RequestModel):
    """Body of `POST /update_weights`."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Directory of the checkpoint on the server, beneath one of `weights_directories`."""
    model: str | None = None
    """The model whose weights are replaced; needed only where the server has several."""
    alongside: bool | None = None
    """Whether the new weights are loaded while the present ones serve, which takes memory for both; false: requests
    are held while they load. Default: as the host's memory allows; false on a GPU and with several models."""


class WeightsUpdated(msgspec.Struct, kw_only=True):
    """Answer to `POST /update_weights`: the new weights are served."""

    object: Literal["kaon.weights"] = "kaon.weights"
    model_path: str


class ReloadResult(msgspec.Struct, kw_only=True):
    """Answer to `POST /kaon/reload`."""

    object: Literal["kaon.reload"] = "kaon.reload"
    changed: list[str]
    """Settings that are in force now with new values."""
    need_restart: list[str]
    """Settings that have changed, and that need a restart to be in force."""


class QuotaView(msgspec.Struct):
    """One quota a minute."""

    limit: int
    remaining: int
    """The amount that may be used now."""
    reset_seconds: float
    """Until the whole minute's quota is there again, if nothing more is used."""


class OwnerLimits(msgspec.Struct, kw_only=True):
    """Answer to `GET /kaon/limits`: what the caller uses, has used and may use."""

    object: Literal["kaon.limits"] = "kaon.limits"
    name: str
    """The key's name or the beginning of its digest; without a key, the address."""
    scopes: list[str]
    group: str | None = None
    weight: float = 1.0
    in_use: dict[str, int]
    """What the owner uses now, by resource."""
    used: dict[str, int]
    """Requests, refusals and tokens since the server started."""
    quotas: dict[str, QuotaView]
    """Quotas by kind; kinds without a limit are left out."""
    most: dict[str, int | None]
    """Bounds of what one owner may use at a time, by resource; null: none."""


class OwnerUse(msgspec.Struct, kw_only=True):
    """What one owner uses and has used."""

    name: str
    key: str | None
    """The beginning of the key's digest; null without a key."""
    in_use: dict[str, int]
    used: dict[str, int]


class OwnerList(msgspec.Struct, kw_only=True):
    """Answer to `GET /kaon/owners`: the owners that the server knows, those with most requests first."""

    object: Literal["list"] = "list"
    data: list[OwnerUse]
    has_more: bool
