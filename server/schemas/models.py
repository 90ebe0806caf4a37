"""Answers of `/v1/models`, `/version` and `/`."""

from typing import Literal

import msgspec


class Model(msgspec.Struct, kw_only=True):
    """One name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kaon"
    max_model_len: int | None = None
    """Longest prompt plus completion in tokens; null while the model loads."""
    parent: str | None = None
    """The model that a LoRA adapter adapts."""


class ModelList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(msgspec.Struct):
    """Answer to `GET /version`."""

    version: str


class Welcome(msgspec.Struct):
    """Answer to `GET /`: paths of the API and of its description."""

    name: str
    version: str
    models: str
    docs: str
    openapi: str
