"""`as_json`: an answer's struct as the response that carries it. Called by the routes that answer at once."""

import msgspec
from fastapi import Response


def as_json(answer: msgspec.Struct) -> Response:
    """200 with `answer` as the body."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
