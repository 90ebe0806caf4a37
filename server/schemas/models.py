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


class ModelInfo(msgspec.Struct, kw_only=True):
    """One name under which the model is served, in Anthropic's form."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None
    """Longest prompt plus completion in tokens, like `max_tokens`; null while the model loads."""
    max_tokens: int | None = None


class ModelInfoPage(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/models` in Anthropic's form."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


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
