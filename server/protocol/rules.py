"""Types that request models are written in: strict JSON types, ranges with readable errors, refused fields."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic import GetJsonSchemaHandler as JsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NO_CHANGE = "Accepted; changes nothing here."
"""Description of OpenAI's fields that this server has no use for."""

MAX_ITEMS = 2048
"""Most items of a list and fields of an object (OpenAI's limit): a body of millions would hold all others up."""

MAX_STOP_CHARACTERS = 4096
"""Longest stop string: a longer one could only ever match an answer of thousands of tokens."""

_NO_LIMIT = 2**31 - 1
"""From here on an upper bound is of the machine's making, and tells a client nothing: docs leave it out too."""

Item = TypeVar("Item")


class RequestModel(BaseModel):
    """Base of everything a client sends: JSON's types taken strictly, no unknown fields, null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _countable(cls, data: Any) -> Any:
        return _few_fields(data)


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
    """JSON knows no integers but numbers: some clients write 16 as 16.0."""
    return int(value) if type(value) is float and value.is_integer() else value


def rule(predicate: str) -> PydanticCustomError:
    """The error of a value that breaks a rule; `predicate` follows `<field> is <value>; `."""
    return PydanticCustomError("rule", "{predicate}", {"predicate": predicate})


def sentence(text: str) -> PydanticCustomError:
    """The error of a combination of fields; `text` stands alone, after the path of the object if it has one."""
    return PydanticCustomError("sentence", "{text}", {"text": text})


def _few_fields(value: Any) -> Any:
    """Refuse an object of very many fields before each of them becomes an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise rule(f"it may have at most {MAX_ITEMS} fields, and has {len(value)}")
    return value


def _to_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _sound_stop_strings(value: list[str]) -> list[str]:
    if "" in value:
        raise rule("each stop string must have at least 1 character")
    if (longest := max(map(len, value), default=0)) > MAX_STOP_CHARACTERS:
        raise rule(f"each stop string may have at most {MAX_STOP_CHARACTERS} characters, and one has {longest}")
    return value


Items: TypeAlias = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]
"""A list, refused at its first wrong item."""

FewFields = BeforeValidator(_few_fields)
"""Annotation of a plain object, which `RequestModel`s need not have."""

StringOrStrings: TypeAlias = Annotated[
    Items[str],
    AfterValidator(_sound_stop_strings),
    BeforeValidator(_to_list, json_schema_input_type=str | list[str]),
]
"""One string or several; read as a list."""

Unsupported: TypeAlias = Annotated[None, Field(description="Not supported by this release.")]
"""A field that OpenAI knows and this release refuses."""

Ignored: TypeAlias = Annotated[str, Field(description=NO_CHANGE)]
"""A string that OpenAI knows and that changes nothing here."""
