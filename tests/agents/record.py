"""`python -m tests.agents.record SERVER FILE`: records an agent's requests to a server, reduced to their structure.

It is a proxy on a free port, which it prints: configure the agent with its address. `python -m tests.conformance.run
SUITE --record` runs a suite of agents through it. FILE gets a line of JSON for each request whose structure is new:
its path, its headers that matter to an API, and its body without the agent's words. Names of tools and of their
arguments become `tool_1` and `argument_1`; texts become as many words of our own, at most `_MAX_WORDS`. The first
tools are kept, and the first of each further type.
"""

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta", "x-app", "originator", "user-agent")
_KEPT = frozenset(
    (
        *(
            "type",
            "role",
            "model",
            "id",
            "tool_use_id",
            "call_id",
            "tool_call_id",
            "effort",
            "keep",
            "signature",
            "ttl",
        ),
        *(
            "tool_choice",
            "include",
            "status",
            "phase",
            "summary",
            "verbosity",
            "syntax",
            "encrypted_content",
            "detail",
            "display",
        ),
    )
)
"""Fields whose strings belong to the API and not to the agent."""

_GRAMMARS = {"lark": "start: /[a-z ]+/", "regex": "[a-z ]+"}
"""Replacements of an agent's own names."""

_BILLING = "x-anthropic-billing-header:"
_MAX_WORDS, _MAX_TOOLS, _MAX_PROPERTIES = 12, 4, 3


class Reducer:
    """Reduces the requests of one agent; a name gets the same replacement in all of them."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}
        self._arguments: dict[str, str] = {}

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Reduce a request's body."""
        return {key: self._field(key, value) for key, value in body.items()}

    def _field(self, key: str, value: Any) -> Any:
        match key, value:
            case "tools", list():
                return [self._tool(tool) for tool in _first_tools(value)]
            case "format", {"syntax": syntax}:
                return {**value, "definition": _GRAMMARS[syntax]}
            case "input", dict():
                return {self._argument(name): self._value(each) for name, each in value.items()}
            case "name" | "namespace", str():
                return self._tools.setdefault(value, f"tool_{len(self._tools) + 1}")
            case "arguments", str():
                return json.dumps(self._field("input", json.loads(value)))
            case _, str() if key in _KEPT:
                return value
            case _, list() if key in _KEPT and all(isinstance(each, str) for each in value):
                return value
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.body(value)
        if isinstance(value, list):
            return [self._value(each) for each in value]
        return _words(value) if isinstance(value, str) else value

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        schemas = ("input_schema", "parameters")
        return {
            key: self._schema(value)
            if key in schemas
            else self._tool(value)
            if key == "function"
            else self._field(key, value)
            for key, value in tool.items()
        }

    def _schema(self, schema: Any) -> Any:
        """Reduce a JSON schema to the first of its properties."""
        if not isinstance(schema, dict):
            return schema
        reduced = {key: value for key, value in schema.items() if key in ("$schema", "type", "additionalProperties")}
        if isinstance(properties := schema.get("properties"), dict):
            kept = list(properties)[:_MAX_PROPERTIES]
            reduced["properties"] = {self._argument(name): self._schema(properties[name]) for name in kept}
            reduced["required"] = [self._argument(name) for name in schema.get("required", ()) if name in kept]
        if "items" in schema:
            reduced["items"] = self._schema(schema["items"])
        if isinstance(schema.get("description"), str):
            reduced["description"] = _words(schema["description"])
        return reduced

    def _argument(self, name: str) -> str:
        return self._arguments.setdefault(name, f"argument_{len(self._arguments) + 1}")


def _first_tools(tools: list[Any]) -> list[Any]:
    types = {tool.get("type"): number for number, tool in reversed(list(enumerate(tools)))}
    return [tool for number, tool in enumerate(tools) if number < _MAX_TOOLS or number in types.values()]


def shape(value: Any, key: str = "") -> Any:
    """`value` without the parts that differ between requests of one structure, for comparison."""
    if isinstance(value, dict):
        return tuple((name, shape(value[name], name)) for name in sorted(value))
    if isinstance(value, list):
        return tuple(shape(each, key) for each in value)
    return value if key in ("type", "role") or isinstance(value, bool) else type(value).__name__


def _words(text: str) -> str:
    """As many words as `text` has, of our own; the billing line keeps its form."""
    if text.startswith(_BILLING):
        return f"{_BILLING} version=1.2.3.{hashlib.sha256(text.encode()).hexdigest()[:3]}; entrypoint=test;"
    return " ".join(["word"] * min(len(text.split()), _MAX_WORDS))


def proxy(server: str, file: Path) -> Starlette:
    """An application that forwards all requests to `server`, and writes the structure of POST requests into `file`."""
    client = httpx.AsyncClient(base_url=server, timeout=None)
    reducer, seen, shapes = Reducer(), list[dict[str, Any]](), set[Any]()

    async def passed_on(request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.method == "POST":
            headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
            # The product, without the machine that it runs on.
            headers["user-agent"] = headers.get("user-agent", "").partition(" ")[0]
            reduced = {"path": path, "headers": headers, "body": reducer.body(json.loads(body))}
            if (structure := shape(reduced)) not in shapes:
                shapes.add(structure)
                seen.append(reduced)
                file.write_text("".join(json.dumps(each) + "\n" for each in seen))
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "accept-encoding")}
        sent = client.build_request(request.method, path, headers=headers, content=body)
        answer = await client.send(sent, stream=True)

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in answer.aiter_raw():
                yield chunk
            await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in ("transfer-encoding", "date")}
        return StreamingResponse(chunks(), answer.status_code, kept)

    methods = ["GET", "HEAD", "POST", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", passed_on, methods=methods)])


@contextmanager
def recording(server: str, file: Path) -> Iterator[str]:
    """Yields the URL of a proxy to `server`, which runs in a process of its own until the end of the block."""
    command = [sys.executable, "-m", "tests.agents.record", server, str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[-1]
        finally:
            process.terminate()


def main(arguments: list[str]) -> int:
    """Run until Ctrl-C."""
    server, file = arguments
    config = uvicorn.Config(proxy(server, Path(file)), port=0, log_level="warning")
    listener = config.bind_socket()
    sys.stderr.write(f"point the agent at http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stderr.flush()
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
