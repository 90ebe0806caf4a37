"""A tiny MCP server over standard input and output, with one tool: `read_note`."""

import json
import sys
from typing import Any

_TOOL = {
    "name": "read_note",
    "description": "Read the note with this title.",
    "inputSchema": {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
}


def _result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [_TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": f"{params['arguments']['title']}: buy milk"}]}
    return None


def main() -> None:
    """Answer one request per line until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = _result(message["method"], message.get("params", {}))
        answer = {"error": {"code": -32601, "message": "unknown method"}} if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
