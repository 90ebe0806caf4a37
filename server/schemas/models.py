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


class ReasoningLevel(msgspec.Struct):
    """A value of `reasoning.effort`."""

    effort: str
    description: str


class TruncationPolicy(msgspec.Struct):
    """How much of a tool's output an agent shows to the model."""

    mode: Literal["bytes", "tokens"]
    limit: int


class CatalogModel(msgspec.Struct, kw_only=True):
    """A model as Codex's catalog describes it: what Codex has to know to use it."""

    slug: str
    display_name: str
    description: str
    default_reasoning_level: str | None = None
    supported_reasoning_levels: list[ReasoningLevel] = []
    """Empty for a model that does not reason."""
    shell_type: Literal["unified_exec"] = "unified_exec"
    visibility: Literal["list"] = "list"
    supported_in_api: bool = True
    priority: int
    """The lowest is Codex's default."""
    upgrade: None = None
    base_instructions: str
    """The first message of every conversation, unless the user of Codex sets another."""
    supports_reasoning_summaries: bool = False
    supports_reasoning_summary_parameter: bool = False
    support_verbosity: bool = False
    default_verbosity: None = None
    apply_patch_tool_type: Literal["freeform"] = "freeform"
    truncation_policy: TruncationPolicy
    supports_parallel_tool_calls: bool = True
    context_window: int | None
    max_context_window: int | None
    experimental_supported_tools: list[str] = []
    input_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])


class ModelList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[CatalogModel]
    """The same models in the form of Codex's catalog."""


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
