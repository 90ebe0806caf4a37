"""`grammar_of`: from the form that a request wants for its answer to the grammar that the engine follows.

Called by the preparation of completions and chats.
"""

from engine.structured.spec import CheckUnavailable, GrammarKind, GrammarSpec, InvalidGrammar
from server.errors import BadRequest, NotReady
from server.frontend import Frontend
from server.protocol.common import SamplingFields
from server.protocol.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat

_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


async def grammar_of(request: SamplingFields, frontend: Frontend) -> str | None:
    """The grammar of a request's answers; None: they are free. Raises `BadRequest`, with the field, and `NotReady`."""
    asked = forms(request)
    if not asked:
        return None
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise BadRequest(f"{first} and {second} are both set; an answer has one form, so send one", param=second)
    [(field, spec)] = asked.items()
    try:
        return await frontend.grammars.compile_async(spec)
    except InvalidGrammar as error:
        raise refused(field, error) from error
    except CheckUnavailable as error:
        raise NotReady(f"{field} cannot be checked now: {error}") from error


def refused(field: str, error: InvalidGrammar) -> BadRequest:
    """The answer to a request whose `field` holds a grammar that cannot be followed."""
    return BadRequest(f"{field} is refused: {error}", param=field)


def forms(request: SamplingFields) -> dict[str, GrammarSpec]:
    """What `request` asks of its answers, by field."""
    asked: dict[str, GrammarSpec] = {}
    response_format: ResponseFormat | None = getattr(request, "response_format", None)
    if isinstance(response_format, JsonObjectFormat):
        asked["response_format"] = GrammarSpec("json_object")
    elif isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        spec = GrammarSpec("json_object") if schema is None else GrammarSpec("json", schema)
        asked["response_format.json_schema.schema"] = spec
    if request.structured_outputs is not None:
        for name, value in request.structured_outputs.forms.items():
            kind: GrammarKind = name  # type: ignore[assignment]  # the fields are named for the kinds
            asked[f"structured_outputs.{name}"] = GrammarSpec(kind, value)
    for field, kind in _GUIDED.items():
        value = getattr(request, field)
        if value is not None:
            asked[field] = GrammarSpec(kind, value)
    return asked
