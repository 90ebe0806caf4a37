"""`/v1/models`: what is served."""

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


class ModelList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
