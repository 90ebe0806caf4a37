"""`Entrance`: names each request, tells its answer the name, and logs it. The outermost layer of `server.app`."""

import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access_log import AccessLog, Ended
from server.request_id import HEADER, REQUEST_ID, new_request_id, usable_request_id

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
