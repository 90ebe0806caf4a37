"""Requests of coding agents, reduced to their structure, with words of our own in place of theirs.

`codex` is the request of Codex CLI 0.169 at its default settings, with one MCP server and the model's catalog entry.
"""

from typing import Any

_TEXT = {"type": "string", "description": "A text."}
_NUMBER = {"type": "number", "description": "A number."}


def _function(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": f"What {name} does.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


PATCH_GRAMMAR = r"""
start: opening part+ closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?
part: new_file | old_file
new_file: "*** Add File: " path LF added+
old_file: "*** Delete File: " path LF
path: /(.+)/
added: "+" /(.*)/ LF -> line

%import common.LF
"""
"""A grammar like that of an agent's tool: rules, aliases, an import."""

SHELL = _function("exec_command", ["cmd"], cmd=_TEXT, workdir=_TEXT, yield_time_ms=_NUMBER, tty={"type": "boolean"})
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
NOTES = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "Tools in the mcp__notes namespace.",
    "tools": [_function("read_note", ["title"], title=_TEXT)],
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for agents below this one.",
    "tools": [
        _function("spawn_agent", [], message=_TEXT, items={"type": "array", "items": {"type": "object"}}),
        _function("wait_agent", ["targets"], targets={"type": "array", "items": _TEXT}),
    ],
}
CODEX_TOOLS: list[dict[str, Any]] = [
    SHELL,
    _function("write_stdin", ["session_id"], session_id=_NUMBER, chars=_TEXT),
    PATCH,
    _function("view_image", ["path"], path=_TEXT),
    AGENTS,
    NOTES,
    {"type": "web_search", "external_web_access": False},
]
HOSTED = f"tools[{len(CODEX_TOOLS) - 1}] (web_search)"


def message(role: str, *texts: str) -> dict[str, Any]:
    """A message as Codex sends it."""
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}


def codex(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A turn of Codex; `items` follow its first messages."""
    opening = [
        message("developer", "You are an agent."),
        message("developer", "These are your skills.", "You may read all files."),
        message("user", "The directory is ~/work."),
    ]
    return {
        "model": "kaon-demo",
        "stream": True,
        "input": [*opening, *items],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a20608-7acf-71d0-9803-eb029fde363a",
        "client_metadata": {"thread_id": "01a20608", "x-codex-turn-metadata": '{"turn_id": "1"}'},
        **fields,
    }


CODEX_HEADERS = {"originator": "codex_exec", "accept": "text/event-stream", "user-agent": "codex_exec/0.169.0"}


def as_codex_returns(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as Codex sends it back: without status and plain reasoning, with its id unchanged."""
    kept = {name: value for name, value in item.items() if name != "status" and value is not None}
    if item["type"] == "reasoning":
        del kept["content"]
    if item["type"] == "message":
        kept["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return kept
