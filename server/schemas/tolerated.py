"""Fields that requests may hold although they have no effect here, because clients that people use send them.

Everything else that the API does not know is a 400. A field with `values` is accepted only with one of these, which
ask for nothing that the server does not do. What is left out is named in the answer's `x-kaon-ignored` header.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

from server.ignored import ignore

Place: TypeAlias = Literal["", "messages[].", "messages[].content[].", "messages[].tool_calls[].", "tools[]."]
"""Where a field is: in the request itself, or in one of its objects."""


class Tolerated(NamedTuple):
    """A field without effect."""

    place: Place
    name: str
    sent_by: str
    """Clients, or what the field is for."""
    values: tuple[Any, ...] = ()
    """Values that are accepted; none: any."""


TOLERATED = (
    Tolerated("", "cache_prompt", "clients of llama.cpp; prefixes are always cached"),
    Tolerated("", "use_beam_search", "older clients of vLLM", (False,)),
    Tolerated("", "early_stopping", "older clients of vLLM", (False,)),
    Tolerated("", "length_penalty", "older clients of vLLM", (1,)),
    Tolerated("", "spaces_between_special_tokens", "clients of vLLM", (True,)),
    Tolerated("", "typical_p", "samplers of llama.cpp, switched off", (1,)),
    Tolerated("", "tfs_z", "samplers of llama.cpp, switched off", (1,)),
    Tolerated("", "mirostat", "samplers of llama.cpp, switched off", (0,)),
    Tolerated("", "top_a", "samplers of OpenRouter, switched off", (0,)),
    Tolerated("", "include_reasoning", "clients of OpenRouter and vLLM; reasoning is always reported", (True,)),
    Tolerated("", "separate_reasoning", "clients of SGLang; reasoning is always separate", (True,)),
    Tolerated("", "enable_search", "clients of Qwen's service", (False,)),
    Tolerated("", "keep_alive", "clients of Ollama"),
    Tolerated("", "num_ctx", "clients of Ollama"),
    Tolerated("", "provider", "clients of OpenRouter: routing"),
    Tolerated("", "transforms", "clients of OpenRouter: routing"),
    Tolerated("", "route", "clients of OpenRouter: routing"),
    Tolerated("", "usage", "clients of OpenRouter; usage is always reported"),
    Tolerated("", "cache_control", "Anthropic's cache hints, as agents send them to every server"),
    Tolerated("messages[].", "cache_control", "Anthropic's cache hints"),
    Tolerated("messages[].", "reasoning_details", "clients of OpenRouter, which send reasoning back"),
    Tolerated("messages[].", "thinking_blocks", "clients of LiteLLM"),
    Tolerated("messages[].", "provider_specific_fields", "clients of LiteLLM"),
    Tolerated("messages[].content[].", "cache_control", "Anthropic's cache hints"),
    Tolerated("messages[].tool_calls[].", "provider_specific_fields", "clients of LiteLLM"),
    Tolerated("messages[].tool_calls[].", "extra_content", "clients of Gemini's OpenAI interface"),
    Tolerated("tools[].", "cache_control", "Anthropic's cache hints"),
)

_BY_PLACE: dict[str, dict[str, Tolerated]] = {}
for _field in TOLERATED:
    _BY_PLACE.setdefault(_field.place, {})[_field.name] = _field


def without_tolerated(data: dict[str, Any], place: Place) -> dict[str, Any]:
    """`data` without the fields that are tolerated at `place`, which are recorded as ignored."""
    fields = _BY_PLACE[place]
    left_out = [
        name
        for name in fields.keys() & data.keys()
        if data[name] is None or not fields[name].values or data[name] in fields[name].values
    ]
    if not left_out:
        return data
    for name in sorted(left_out):
        ignore(f"{place}{name}")
    return {name: value for name, value in data.items() if name not in left_out}
