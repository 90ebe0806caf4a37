"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, whose fields are vLLM's."""

from typing import Annotated

from pydantic import AfterValidator, Field

from server.schemas.body import RequestModel, sentence


def _printable(name: str) -> str:
    if not name.isprintable():
        raise sentence("lora_name has a line break or another character that cannot be shown; leave it out")
    return name


_Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]


class LoadAdapterRequest(RequestModel):
    """An adapter to load."""

    lora_name: _Name
    """The name by which requests select it as `model`."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its directory on the server, beneath one of `lora_directories`."""
    model: str | None = None
    """The model that it adapts; needed only where the server has several models."""
    load_inplace: bool = False
    """Replace the adapter of that name, which requests that are running go on to use."""


class UnloadAdapterRequest(RequestModel):
    """An adapter to unload."""

    lora_name: _Name
    """Its name."""
