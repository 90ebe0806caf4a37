"""`RequireKey`: asks each request for an API key. Put before the routes by `server.app`, where there are keys."""

from collections.abc import Iterable

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth import KeyRing
from server.errors import InvalidApiKey, as_response
from server.middleware.paths import route_path

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
