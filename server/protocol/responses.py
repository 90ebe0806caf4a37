"""`/v1/responses`: the requests. Answers: `responses_answer`; items: `responses_input` and `responses_items`."""

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.sampling_params import MAX_LOGPROBS
from engine.structured.spec import is_deeper
from server.protocol.common import INT31, SamplingFields
from server.protocol.responses_input import Input
from server.protocol.rules import (
    NO_CHANGE,
    Between,
    FewFields,
    Ignored,
    Items,
    RequestModel,
    Unsupported,
    rule,
    sentence,
)
from server.protocol.structured import JsonObjectFormat, JsonSchema, TextFormat
from server.protocol.tools import FunctionName

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_NESTING = 400

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Summary: TypeAlias = Literal["auto", "concise", "detailed"]
Includable: TypeAlias = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _not_too_deep(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse what could be read, but not be repeated in an answer, which nests it deeper, by every Python."""
    if is_deeper(schema, _MAX_NESTING):
        raise rule(f"it is nested too deeply; it may have at most {_MAX_NESTING} levels")
    return schema


Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
"""A JSON schema."""


def _is_function(data: Any) -> Any:
    """Refuse what is no function by the name of its type."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise sentence(f"is of type {kind[:60]}, a tool that this server does not have; it takes type function only")
    return data


def _only(value: int | bool) -> BeforeValidator:
    """Takes `value` alone. To a literal type, as to Python, 0 is False as well, and true is 1."""

    def check(given: Any) -> Any:
        if type(given) is not type(value) or given != value:
            raise rule(f"it must be {json.dumps(value)}")
        return given

    return BeforeValidator(check)


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    """JSON schema of the arguments, an object's; default: any object."""
    strict: bool | None = None
    """Hold the arguments of every call to `parameters`; default: false."""


class FunctionChoice(RequestModel):
    """The function that must be called, or one of those that may be."""

    type: Literal["function"]
    name: str


class AllowedFunctions(RequestModel):
    """Some of the tools; the prompt shows all of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[Annotated[FunctionChoice, BeforeValidator(_is_function)]], Field(min_length=1)]


def _is_choice(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise rule("it must be 'none', 'auto' or 'required', or an object that names functions")
        return value
    if not isinstance(value, dict):
        raise rule("it must be 'none', 'auto' or 'required', or an object that names functions")
    return value if value.get("type") == "allowed_tools" else _is_function(value)


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | Annotated[FunctionChoice | AllowedFunctions, Field(discriminator="type")],
    BeforeValidator(_is_choice),
]


class JsonSchemaText(JsonSchema):
    """JSON text that a schema describes."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class TextConfig(RequestModel):
    """Form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None
    """Only OpenAI's default, which changes nothing here."""


class ReasoningConfig(RequestModel):
    """How the model thinks before it answers."""

    effort: Effort | None = None
    """Given to the chat template as `reasoning_effort`; `none` also turns `enable_thinking` off."""
    summary: Annotated[Summary | None, Field(description=NO_CHANGE)] = None
    generate_summary: Annotated[Summary | None, Field(description=NO_CHANGE)] = None


def _fits_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MAX_METADATA:
        raise rule(f"it may have at most {_MAX_METADATA} keys, and has {len(value)}")
    for key, text in value.items():
        if len(key) > _MAX_KEY or len(text) > _MAX_VALUE:
            raise rule(f"its keys may have at most {_MAX_KEY} characters and its values {_MAX_VALUE}")
    return value


class ResponsesRequest(SamplingFields):
    """Body of `POST /v1/responses`."""

    input: Input
    """What the model is to answer."""

    instructions: str | None = None
    """A system message before everything else; that of an earlier response is not carried over."""

    previous_response_id: str | None = None
    """Go on from this stored response: its input and output come before `input`."""

    max_output_tokens: Annotated[int, Between(1, INT31)] | None = None
    """Most tokens to generate, reasoning included; default: what the context has left."""

    tools: Items[Annotated[FunctionTool, BeforeValidator(_is_function)]] = []  # noqa: RUF012
    """Functions that the model may call: shown to it by its chat template."""

    tool_choice: ToolChoice = "auto"
    """`none` hides the tools from the model; `required`, or a function's name, makes it call one."""

    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""

    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()

    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto` leaves out the oldest items where the context has no room for all; `disabled` answers 400."""

    store: bool = True
    """Keep the response, so that it can be retrieved and gone on from, until the store needs its place."""

    background: bool = False
    """Answer at once, and run on without the client. Needs `store`."""

    include: Items[Includable] = []  # noqa: RUF012
    """`message.output_text.logprobs` reports log probabilities; the others name what no answer here can hold."""

    top_logprobs: Annotated[int, Between(0, MAX_LOGPROBS)] | None = None
    """Report this many likeliest alternatives with each log probability."""

    metadata: Annotated[dict[str, str], FewFields, AfterValidator(_fits_metadata)] = {}  # noqa: RUF012
    """Kept with the response."""

    chat_template_kwargs: Annotated[dict[str, Any], FewFields] = {}  # noqa: RUF012
    """Further variables of the model's chat template."""

    n: Annotated[Literal[1], _only(1)] = 1
    """A response has one answer."""

    prompt_logprobs: Unsupported = None
    return_token_ids: Annotated[Literal[False], _only(False)] = False

    max_tool_calls: Annotated[int, Between(1, INT31), Field(description=NO_CHANGE)] | None = None
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    prompt_cache_options: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    access_programs: Unsupported = None
    context_management: Unsupported = None
    conversation: Unsupported = None
    image: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None

    @model_validator(mode="after")
    def _background_is_stored(self) -> "ResponsesRequest":
        if self.background and not self.store:
            raise sentence("background is true; it needs store to be true, because only the store holds its answer")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or bool(self.top_logprobs)


class InputTokensRequest(ResponsesRequest):
    """Body of `POST /v1/responses/input_tokens`: a request for a response, of which only the prompt matters."""

    model: str = ""
    """Name of a served model; default: the first."""
