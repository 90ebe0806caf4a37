"""`route_path`: a request's path as the routes see it. Used by the layers that act before the routes do."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path without the prefix of a proxy (`root_path`), where the proxy left it there."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and path.startswith(prefix + "/") else path
