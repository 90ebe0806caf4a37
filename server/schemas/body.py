"""Request bodies: the types of which request models consist, and the conversion of bytes to a validated model.

`RequestModel` and the annotated types check strict JSON types, ranges and unknown fields. `parse_object` and
`validate` convert bytes to a model; `_sentence` converts the first error to the sentence that the client gets.
"""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, TypeAlias, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic import GetJsonSchemaHandler as JsonSchemaHandler
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from engine.config.section import docstrings
from engine.config.spelling import nearest
from engine.text.structured.spec import is_deeper
from server.errors import BadRequest
from server.schemas.tolerated import ObjectPath, without_tolerated

NO_CHANGE = "Accepted; changes nothing here."
"""Description of OpenAI's fields that have no effect here."""

MAX_ITEMS = 2048
"""Most items of a list and fields of an object (OpenAI's limit): millions of them would block other requests."""

MAX_STOP_CHARACTERS = 4096
"""Length of the longest stop string; a longer one could match only answers of thousands of tokens."""

_MAX_NESTING = 400
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512

_NO_LIMIT = 2**31 - 1
"""Upper bounds from this value on come from integer types, so messages and docs do not mention them."""

Item = TypeVar("Item")


class RequestModel(BaseModel):
    """Base of all objects in requests: strict JSON types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    object_path: ClassVar[ObjectPath | None] = None
    """Path of these objects, if they may have fields of `server.schemas.tolerated`."""
    input_field: ClassVar[str | None] = None
    """Name of the list that holds most objects of a request, such as its messages."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: JsonSchemaHandler) -> dict[str, Any]:
        """Describe the fields by their docstrings."""
        reference = handler(core_schema)
        properties = handler.resolve_ref_schema(reference).get("properties", {})
        for name, text in docstrings(cls).items():
            properties[cls.model_fields[name].alias or name]["description"] = text
        return reference

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        data = _limit_fields(data)
        return (
            data if cls.object_path is None or not isinstance(data, dict) else without_tolerated(data, cls.object_path)
        )


def without_nulls(data: Any) -> Any:
    """Return `data`, if it is an object, without null fields: official clients send every field of their models."""
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


@dataclass(frozen=True, slots=True)
class Between:
    """Annotation of a number in `[low, high]`, or `(low, high]` with `low_open`."""

    low: float
    high: float
    low_open: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if source is int:
            schema = core_schema.no_info_before_validator_function(_whole, schema)
        return core_schema.no_info_after_validator_function(self._check, schema)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: JsonSchemaHandler) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.low_open else "minimum"
        return {**handler(schema), lower: self.low, "maximum": self.high}

    def _check(self, value: float) -> float:
        if self.low <= value <= self.high and not (self.low_open and value == self.low):
            return value
        if value < self.low and self.high >= _NO_LIMIT:
            raise rule(f"it must be at least {self.low}")
        if self.low_open:
            raise rule(f"it must be above {self.low} and at most {self.high}")
        raise rule(f"it must be between {self.low} and {self.high}")


def _whole(value: Any) -> Any:
    """Convert an integer that is written as 16.0 to an int: JSON does not distinguish it from 16."""
    return int(value) if type(value) is float and value.is_integer() else value


def rule(predicate: str) -> PydanticCustomError:
    """Create the error of a value that breaks a rule. `predicate` follows `<field> is <value>; `."""
    return PydanticCustomError("rule", "{predicate}", {"predicate": predicate})


def sentence(text: str) -> PydanticCustomError:
    """Create the error of a combination of fields. `text` follows the path of the object, if there is one."""
    return PydanticCustomError("sentence", "{text}", {"text": text})


def _limit_fields(value: Any) -> Any:
    """Refuse an object with very many fields, before each of them becomes an error."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise rule(f"it may have at most {MAX_ITEMS} fields, and has {len(value)}")
    return value


def _to_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _check_stop_strings(value: list[str]) -> list[str]:
    if "" in value:
        raise rule("each stop string must have at least 1 character")
    if (longest := max(map(len, value), default=0)) > MAX_STOP_CHARACTERS:
        raise rule(f"each stop string may have at most {MAX_STOP_CHARACTERS} characters, and one has {longest}")
    return value


def _not_too_deep(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema that can be parsed, but not encoded in an answer, which nests it deeper."""
    if is_deeper(schema, _MAX_NESTING):
        raise rule(f"it is nested too deeply; it may have at most {_MAX_NESTING} levels")
    return schema


def _fits_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MAX_METADATA:
        raise rule(f"it may have at most {_MAX_METADATA} keys, and has {len(value)}")
    for key, text in value.items():
        if len(key) > _MAX_KEY:
            raise rule(
                f"its keys may have at most {_MAX_KEY} characters, and {key[:_SHOWN_CHARACTERS]}… has {len(key)}"
            )
        if len(text) > _MAX_VALUE:
            raise rule(f"its values may have at most {_MAX_VALUE} characters, and that of {key} has {len(text)}")
    return value


Items: TypeAlias = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]
"""A list that is refused at its first invalid item."""

FewFields = BeforeValidator(_limit_fields)
"""Annotation that limits the fields of a plain object; `RequestModel`s have this limit already."""

Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
"""A JSON schema that the answer repeats."""

Metadata: TypeAlias = Annotated[dict[str, str], FewFields, AfterValidator(_fits_metadata)]
"""Keys and values for the client's own use, within OpenAI's limits."""

StringOrStrings: TypeAlias = Annotated[
    Items[str],
    AfterValidator(_check_stop_strings),
    BeforeValidator(_to_list, json_schema_input_type=str | list[str]),
]
"""One string or a list of strings, which is parsed as a list."""

Unsupported: TypeAlias = Annotated[None, Field(description="Not supported by this release.")]
"""A field of OpenAI's API that this release refuses."""

Ignored: TypeAlias = Annotated[str, Field(description=NO_CHANGE)]
"""A string field of OpenAI's API that has no effect here."""


# -- reading ----------------------------------------------------------------------------------------------------

Model = TypeVar("Model", bound=RequestModel)

_NOUNS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_SHOWN_CHARACTERS = 60
JSON = "application/json"
_MAX_CONTAINERS = 2**16
"""Most lists and objects in a body: they take several times as long to create as numbers and texts."""
_MAX_FIELDS = 2**16
"""Most fields of all objects in a body: a key costs as much as several values."""
_BYTES_PER_VALUE = 16
"""Bytes of the body limit per allowed value. Texts have more bytes per value, token ids fewer; but the limit of bytes
allows a prompt of ids four times as many as a full context needs."""
_SLICE = 64 * 2**10
"""Bytes that are examined at a time: between two slices other threads may run."""
_EXPLAINED_BYTES = 64 * 2**10
"""Largest body that is parsed a second time to explain why it is not JSON."""
_LEAVE_OUT = "leave it out, or start the server with --allow-unknown-fields"


def parse_object(body: bytes, max_bytes: int = 2**22) -> dict[str, Any]:
    """Parse `body`, of at most `max_bytes`, as a JSON object. Raises `BadRequest`.

    The time is bounded by `max_bytes` for any content, and other threads may run at least about every 20 ms.
    """
    if not body.strip():
        raise BadRequest("the request body is empty; send a JSON object")
    check_values([body], max_bytes // _BYTES_PER_VALUE)
    try:
        parsed = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(_why_not_json(body, error)) from None
    if not isinstance(parsed, dict):
        raise BadRequest(f"the request body is {_shown(parsed)}; it must be a JSON object")
    return parsed


def _float(literal: str) -> float:
    """Parse a number with a fraction or an exponent. msgspec's parser takes 15 microseconds for the most difficult
    ones; and while Python code is called, another thread may run."""
    value = float(literal)
    if math.isinf(value):
        raise ValueError
    return value


_decoder = msgspec.json.Decoder(float_hook=_float)


def check_values(texts: Sequence[bytes], max_values: int = 0, subject: str = "the request body") -> None:
    """Raise `BadRequest` if JSON texts together have too many values, fields, or lists and objects.

    The content of strings does not count.
    """
    max_values = max(max_values, 2 * _MAX_CONTAINERS)
    num_containers = sum(text.count(b"[") + text.count(b"{") for text in texts)
    is_small = num_containers <= _MAX_CONTAINERS and num_containers + sum(map(_commas, texts)) <= max_values
    if is_small and sum(text.count(b":") for text in texts) <= _MAX_FIELDS:
        return
    num_containers = num_fields = num_values = 0
    for outside in (part for text in texts for part in _outside_strings(text)):
        opened = outside.count(b"[") + outside.count(b"{")
        num_containers += opened
        num_fields += outside.count(b":")
        num_values += opened + _commas(outside)
        if num_containers > _MAX_CONTAINERS:
            raise BadRequest(f"{subject} holds more than {_MAX_CONTAINERS} lists and objects; send fewer")
        if num_fields > _MAX_FIELDS:
            raise BadRequest(f"{subject} holds more than {_MAX_FIELDS} fields; send fewer")
        if num_values > max_values:
            raise BadRequest(
                f"{subject} holds more than {max_values} values; send fewer, or start the server with a higher "
                f"--max-request-bytes, of {_BYTES_PER_VALUE} for each value"
            )


def num_containers(text: bytes) -> int:
    """Return the number of lists and objects in a JSON text."""
    return sum(part.count(b"[") + part.count(b"{") for part in _outside_strings(text))


def _commas(text: bytes) -> int:
    return text.count(b",")


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield the parts of a JSON text outside of strings."""
    start = 0
    is_in_string = False
    while start < len(text):
        end = start + _SLICE
        while text[end - 1 : end] == b"\\":
            end += 1  # Keep an escaped character in the slice of its backslash.
        pieces = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[is_in_string::2])
        is_in_string ^= len(pieces) % 2 == 0
        start = end


def _why_not_json(body: bytes, why: Exception) -> str:
    """Explain why the strict parser refused `body`; for a small body by the standard parser, whose errors say more."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return f"the request body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}"
    if len(body) > _EXPLAINED_BYTES:
        return f"the request body is not valid JSON, is nested too deeply, or holds a number out of range: {why}"
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
    """Validate `data` as `model`. A field that is null counts as absent. Raises `BadRequest` for the first error."""
    known = model.model_fields
    given = {name: value for name, value in data.items() if value is not None or name not in known}
    try:
        return model.model_validate(given, extra="ignore" if allow_unknown else None)
    except ValidationError as error:
        raise _first_error(given, error, known) from None


def _first_error(data: dict[str, Any], error: ValidationError, known: Collection[str]) -> BadRequest:
    """Convert `error` to the error of the answer. `known` are the top-level fields of the request."""
    errors = error.errors(include_url=False)
    located = [(*_locate(data, each), each) for each in errors]
    path, value, first = located[0]
    # Every member of a union reports an error. The intended member is the one whose error has the longest path.
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
    # A sentence about several fields begins with the name of the field to change, or with the path of its object.
    subject = sentence.partition(" ")[0]
    return BadRequest(sentence, param=path or (subject if subject.partition("[")[0] in known else None))


def _locate(data: Any, error: ErrorDetails) -> tuple[str, Any]:
    """Return the path of a field, without pydantic's names of union members, and its value."""
    path, value, found = _walk(data, error, skips_types=False)
    if found != error["input"]:
        # A name of a union member may also be that of a field: a tool of type function has no field `function` here,
        # but a client may have sent one.
        other_path, other_value, found = _walk(data, error, skips_types=True)
        if found == error["input"]:
            return other_path, other_value
    return path, value


def _walk(data: Any, error: ErrorDetails, *, skips_types: bool) -> tuple[str, Any, Any]:
    """Return a path, its value, and the value that pydantic refused: that of the object if the field is absent.

    `skips_types`: whether a step is the name of a union member if it is the `type` of the object.
    """
    path, value, found = "", data, data
    loc = error["loc"]
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        loc = (*loc, error["ctx"]["discriminator"].strip("'"))
    absent = error["type"] in ("missing", "union_tag_not_found")
    for index, step in enumerate(loc):
        is_last = index == len(loc) - 1
        if isinstance(step, int):
            if not (isinstance(value, list) and step < len(value)):
                continue
            path, value = f"{path}[{step}]", value[step]
            found = value
        elif skips_types and isinstance(value, dict) and value.get("type") == step:
            continue
        elif isinstance(value, dict) and (step in value or (absent and is_last)):
            name = step[:_SHOWN_CHARACTERS]
            found = value if absent and is_last else value.get(step)
            path, value = f"{path}.{name}" if path else name, value.get(step)
    return path, value, found


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
    if kind == "string_too_long":
        limit = f"it may have at most {context['max_length']} characters, and has {len(value)}"
        return f"{path} is {_shown(value)}; {limit}"
    if kind == "greater_than_equal":
        return f"{path} is {_shown(value)}; it must be at least {context['ge']}"
    nouns = list(dict.fromkeys(_NOUNS[each["type"]] for each in errors if each["type"] in _NOUNS))
    if nouns:
        return f"{path} is {_shown(value)}; it must be {' or '.join(nouns)}"
    return f"{path} is {_shown(value)}; {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """Format a value for a sentence: shortened JSON, or the kind of a container."""
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
