"""Fields that requests may have although they have no effect here, because common clients send them.

All other unknown fields are a 400. A field with `values` is accepted only with one of these, which ask for nothing
that the server does not do anyway. Ignored fields are listed in the answer's `x-kaon-ignored` header.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

from server.ignored import ignore

ObjectPath: TypeAlias = Literal[
    "",
    "messages[].",
    "messages[].content[].",
    "messages[].tool_calls[].",
    "messages[].tool_calls[].function.",
    "tools[].",
]
"""Path of the object that has a field: the request itself (empty), or an object within it."""


class Tolerated(NamedTuple):
    """A field without effect."""

    object_path: ObjectPath
    name: str
    sent_by: str
    """The clients that send it, or its purpose."""
    values: tuple[Any, ...] = ()
    """Accepted values; empty means any value."""


_AGENTS_SDK = "OpenAI's Agents SDK for JavaScript, which copies the message's fields into its parts"
_PARSED = "OpenAI's SDKs, in messages that `chat.completions.parse` and `stream` returned"

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
    Tolerated("messages[].", "copilot_cache_control", "GitHub Copilot's cache hints"),
    Tolerated("messages[].", "reasoning_details", "clients of OpenRouter, which send reasoning back"),
    Tolerated("messages[].", "thinking_blocks", "clients of LiteLLM"),
    Tolerated("messages[].", "provider_specific_fields", "clients of LiteLLM"),
    Tolerated("messages[].", "parsed", _PARSED),
    Tolerated("messages[].content[].", "cache_control", "Anthropic's cache hints"),
    Tolerated("messages[].content[].", "prompt_cache_breakpoint", "OpenAI's cache hints"),
    Tolerated("messages[].content[].", "annotations", _AGENTS_SDK),
    Tolerated("messages[].content[].", "reasoning", _AGENTS_SDK),
    Tolerated("messages[].content[].", "reasoning_content", _AGENTS_SDK),
    Tolerated("messages[].content[].", "role", _AGENTS_SDK),
    Tolerated("messages[].content[].", "tool_calls", _AGENTS_SDK),
    Tolerated("messages[].tool_calls[].", "provider_specific_fields", "clients of LiteLLM"),
    Tolerated("messages[].tool_calls[].", "extra_content", "clients of Gemini's OpenAI interface"),
    Tolerated("messages[].tool_calls[].function.", "parsed_arguments", _PARSED),
    Tolerated("tools[].", "cache_control", "Anthropic's cache hints"),
    Tolerated("tools[].", "copilot_cache_control", "GitHub Copilot's cache hints"),
)

_BY_PATH: dict[str, dict[str, Tolerated]] = {}
for _field in TOLERATED:
    _BY_PATH.setdefault(_field.object_path, {})[_field.name] = _field


def without_tolerated(data: dict[str, Any], object_path: ObjectPath) -> dict[str, Any]:
    """Return `data` without the fields that are tolerated at `object_path`, and record these as ignored."""
    fields = _BY_PATH[object_path]
    left_out = [
        name
        for name in fields.keys() & data.keys()
        if data[name] is None or not fields[name].values or data[name] in fields[name].values
    ]
    if not left_out:
        return data
    for name in sorted(left_out):
        ignore(f"{object_path}{name}")
    return {name: value for name, value in data.items() if name not in left_out}
