"""From a request's bytes to its validated model. What is wrong with them leaves as one sentence.

Called by the routes; nothing else reads a body.
"""

import json
from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from engine.config import ServerConfig
from server.errors import BadRequest, BodyTooLarge, UnsupportedMediaType
from server.protocol.rules import RequestModel
from server.spelling import nearest

Model = TypeVar("Model", bound=RequestModel)

_NOUNS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
_SHOWN_CHARACTERS = 60
_MAX_CONTAINERS = 2**17
"""Most lists and objects in a body. Megabytes of empty ones take no room on the wire, and seconds to make."""
_JSON = "application/json"
_LEAVE_OUT = "leave it out, or start the server with --allow-unknown-fields"


async def read_request(request: Request, model: type[Model], limits: ServerConfig) -> Model:
    """The validated body of `request`. Raises `BadRequest`, `BodyTooLarge` and `UnsupportedMediaType`."""
    _check_media_type(request.headers.get("content-type"))
    _check_encoding(request.headers.get("content-encoding"))
    body = await read_body(request, limits.max_request_bytes)
    return validate(parse_object(body), model, allow_unknown=limits.allow_unknown_fields)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, of which no more than `max_bytes` is ever held. Raises `BodyTooLarge`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        _refuse_size(f"has {declared} bytes", max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            _refuse_size("is larger", max_bytes)
    return bytes(body)


def _check_media_type(content_type: str | None) -> None:
    """Refuse what says that it is no JSON. What says nothing is taken for it."""
    media_type = (content_type or _JSON).partition(";")[0].strip().lower()
    if media_type != _JSON and not (media_type.startswith("application/") and media_type.endswith("+json")):
        raise UnsupportedMediaType(
            f"Content-Type is {media_type[:_SHOWN_CHARACTERS]}; it must be {_JSON} (curl: -H 'Content-Type: {_JSON}')"
        )


def _check_encoding(encoding: str | None) -> None:
    """Refuse a compressed body: a small one may hold far more than `max_request_bytes`."""
    if encoding and encoding.strip().lower() != "identity":
        raise UnsupportedMediaType(
            f"Content-Encoding is {encoding[:_SHOWN_CHARACTERS]}; send the body as it is, not compressed"
        )


def _refuse_size(what: str, max_bytes: int) -> NoReturn:
    raise BodyTooLarge(f"the request body {what}; this server takes at most {max_bytes} bytes (max_request_bytes)")


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `BadRequest`."""
    if not body.strip():
        raise BadRequest("the request body is empty; send a JSON object")
    _check_containers(body)
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(_why_not_json(body)) from None
    if not isinstance(parsed, dict):
        raise BadRequest(f"the request body is {_shown(parsed)}; it must be a JSON object")
    return parsed


def _check_containers(body: bytes) -> None:
    """Raise if `body` opens too many lists and objects; brackets in strings do not count."""
    if body.count(b"[") + body.count(b"{") <= _MAX_CONTAINERS:
        return
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > _MAX_CONTAINERS:
        raise BadRequest(
            f"the request body holds {containers} lists and objects; it may hold at most {_MAX_CONTAINERS}"
        )


def _why_not_json(body: bytes) -> str:
    """What a stricter parser refused in `body`: the standard one reads more, and says better where it stops."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return f"the request body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}"
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return f"the request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except BadRequest as error:
        return str(error)
    except (ValueError, RecursionError):
        return "the request body is nested too deeply, or holds a number with too many digits"
    return "the request body holds half a surrogate pair, such as \\ud800, or a number beyond what fits 64 bits"


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the request body holds {name}, which is not JSON; send a finite number")


def validate(data: dict[str, Any], model: type[Model], *, allow_unknown: bool) -> Model:
    """`data` as `model`; a field that is null counts as absent. Raises `BadRequest` for the first thing wrong."""
    known = model.model_fields
    given = {name: value for name, value in data.items() if value is not None or name not in known}
    try:
        return model.model_validate(given, extra="ignore" if allow_unknown else None)
    except ValidationError as error:
        raise _first_error(given, error, known) from None


def _first_error(data: dict[str, Any], error: ValidationError, known: Collection[str]) -> BadRequest:
    """What to answer to `error`; `known` are the fields of the request itself."""
    errors = error.errors(include_url=False)
    located = [(*_locate(data, each), each) for each in errors]
    path, value, first = located[0]
    # The members of a union fail one by one. The one that got deepest into the value is the one that was meant.
    siblings = [each for each in located if each[0].startswith(path)]
    deeper = [each for each in siblings if len(each[0]) > len(path)]
    if deeper and len(siblings) > len(deeper) and (first["type"] in _NOUNS or first["type"] == "literal_error"):
        path, value, first = deeper[0]
        siblings = [(path, value, first)]
    same = [each for each_path, _, each in siblings if each_path == path]
    if first["type"] == "extra_forbidden" and path in data:
        hint = nearest(path, known)
        hint = f"{hint} If not," if hint else ";"
        return BadRequest(f"{path} is not a known field{hint} {_LEAVE_OUT}", param=path)
    sentence = _sentence(path, value, same)
    # One on several fields of the request begins with that which is to change.
    subject = sentence.partition(" ")[0]
    return BadRequest(sentence, param=path or (subject if subject in known else None))


def _locate(data: Any, error: ErrorDetails) -> tuple[str, Any]:
    """The path of a field as a person writes it, and its value. What pydantic adds for unions is no part of it."""
    path, value = "", data
    loc = error["loc"]
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        loc = (*loc, error["ctx"]["discriminator"].strip("'"))
    absent = error["type"] in ("missing", "union_tag_not_found")
    for place, step in enumerate(loc):
        if isinstance(step, int):
            if not (isinstance(value, list) and step < len(value)):
                continue
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, dict) and (step in value or (absent and place == len(loc) - 1)):
            name = step[:_SHOWN_CHARACTERS]
            path, value = f"{path}.{name}" if path else name, value.get(step)
    return path, value


def _sentence(path: str, value: Any, errors: list[ErrorDetails]) -> str:
    kind, message, context = errors[0]["type"], errors[0]["msg"], errors[0].get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return f"{path} is missing; this endpoint needs it"
    if kind == "extra_forbidden":
        return f"{path} is not a known field; {_LEAVE_OUT}"
    if kind == "none_required":
        return f"{path} is not supported by this release; leave it out"
    if kind == "sentence":
        return f"{path} {message}".lstrip()
    if kind == "rule":
        return f"{path or 'the request body'} is {_shown(value)}; {message}"
    if kind == "union_tag_invalid":
        return f"{path} is {_shown(value)}; it must be {context['expected_tags'].replace(', ', ' or ')}"
    if kind == "literal_error":
        return f"{path} is {_shown(value)}; it must be {context['expected']}"
    if kind == "too_short":
        return f"{path} is {_shown(value)}; it must have at least {context['min_length']} item"
    if kind == "too_long":
        return f"{path} is {_shown(value)}; it may have at most {context['max_length']} items, and has {len(value)}"
    if kind == "string_too_short":
        return f"{path} is {_shown(value)}; it must have at least {context['min_length']} character"
    nouns = list(dict.fromkeys(_NOUNS[each["type"]] for each in errors if each["type"] in _NOUNS))
    if nouns:
        return f"{path} is {_shown(value)}; it must be {' or '.join(nouns)}"
    return f"{path} is {_shown(value)}; {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """A value as it goes into a sentence: short ones as JSON, containers by kind."""
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
