"""`Entrance`: names each request, tells its answer the name, and logs it. The outermost layer of `server.app`."""

import time
from collections.abc import Awaitable, Iterable

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access_log import HEADER, REQUEST_ID, AccessLog, Ended, new_request_id, route_path, usable_request_id
from server.errors import InvalidApiKey, as_response
from server.limits.keys import KeyRing

_HEADER = HEADER.lower().encode()


class Entrance:
    """Around everything else, so that each answer there is has its id and its line in the log."""

    def __init__(self, app: ASGIApp, log: AccessLog | None) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_time = time.monotonic()
        request_id = _given_id(scope) or new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _Answer(send, request_id)
        token = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            REQUEST_ID.reset(token)
            if self._log is not None:
                seconds = time.monotonic() - arrival_time
                self._log.write(scope, Ended(request_id, answer.status, answer.complete, answer.bytes, seconds))


class _Answer:
    """What has been sent of an answer. One plain call a message: a coroutine around each would cost every chunk."""

    __slots__ = ("_header", "_send", "bytes", "complete", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (_HEADER, request_id.encode())
        self.status: int | None = None
        self.bytes = 0
        self.complete = False

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), self._header]
        return self._send(message)


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _HEADER:
            return usable_request_id(value)
    return None


# [keys] `RequireKey`: asks each request for an API key. Put before the routes by `server.app`, where there are keys.

_SCHEME = b"bearer "


class RequireKey:
    """Lets pass who brings a key of the ring, and everybody to the open paths. Others get a 401."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = _bearer(scope)
            owner = None if key is None else self._keys.owner(key)
            if owner is None and route_path(scope) not in self._open_paths:
                await as_response(_refusal(key))(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, receive, send)


def owner_of(request: HTTPConnection) -> str | None:
    """Whose request it is, as a name for the key it came with; None where no key was asked for."""
    owner: str | None = request.scope.get("state", {}).get("owner")
    return owner


def _bearer(scope: Scope) -> bytes | None:
    """The key that the request brings; None if it brings none, empty if it brings several."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        return None
    [value] = values if len(values) == 1 else [b""]
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else b""


def _refusal(key: bytes | None) -> InvalidApiKey:
    if key is None:
        return InvalidApiKey("the request has no API key; send one as Authorization: Bearer KEY")
    # The first words are OpenAI's: clients look for them.
    return InvalidApiKey("Incorrect API key provided; send one of this server's as Authorization: Bearer KEY")
