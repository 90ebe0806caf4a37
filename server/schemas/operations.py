"""Answers of the calls for operators."""

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from server.schemas.body import RequestModel


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
