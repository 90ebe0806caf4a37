"""Fields that give the answer a form: `response_format`, `structured_outputs` and its older, flat names."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from server.protocol.rules import Items, RequestModel, rule, sentence

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_MAX_NAME = 64


def _is_schema_name(name: str) -> str:
    if not (1 <= len(name) <= _MAX_NAME and _NAME_CHARACTERS.issuperset(name)):
        raise rule(f"it must be 1 to {_MAX_NAME} of the characters a-z, A-Z, 0-9, _ and -")
    return name


class TextFormat(RequestModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object of any shape."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    name: Annotated[
        str, AfterValidator(_is_schema_name), Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
    ]
    description: str | None = None
    """Accepted; changes nothing here."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Default: any object."""
    strict: bool | None = None
    """Accepted; the answer is held to the schema either way."""


class JsonSchemaFormat(RequestModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
"""Form of the answer."""


class StructuredOutputs(RequestModel):
    """One of these forms for the answer."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A pattern for the whole answer."""
    choice: Items[str] | None = None
    """Texts, one of which is the answer."""
    grammar: str | None = None
    """EBNF, as GBNF (`root ::= …`) or Lark (`start: …`) writes it."""
    json_object: bool | None = None
    """A JSON object of any shape."""

    @model_validator(mode="after")
    def _one_form(self) -> "StructuredOutputs":
        if len(self.forms) > 1:
            raise sentence(f"holds both {' and '.join(self.forms)}; an answer has one form")
        return self

    @property
    def forms(self) -> dict[str, Any]:
        """What is set, by name."""
        forms = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return {name: form for name, form in forms.items() if form is not None}
