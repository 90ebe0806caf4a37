"""The parts of requests and answers that all generating endpoints share.

These are the forms of an answer (`response_format`, `structured_outputs`), the sampling fields of a request, and the
head, the usage and the prompt log probabilities of an answer.
"""

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from pydantic import AfterValidator, Field, model_validator

from engine.sampling_params import MAX_LOGPROBS
from server.schemas.body import (
    Between,
    FewFields,
    Ignored,
    Items,
    RequestModel,
    StringOrStrings,
    rule,
    sentence,
    without_nulls,
)

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_MAX_NAME = 64


def _is_plain_name(name: str) -> str:
    if not (1 <= len(name) <= _MAX_NAME and _NAME_CHARACTERS.issuperset(name)):
        raise rule(f"it must be 1 to {_MAX_NAME} of the characters a-z, A-Z, 0-9, _ and -")
    return name


PlainName: TypeAlias = Annotated[
    str, AfterValidator(_is_plain_name), Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
]


class TextFormat(RequestModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object of any shape."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    name: PlainName
    description: str | None = None
    """Accepted; changes nothing here."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Default: any object."""
    strict: bool | None = None
    """Accepted; the answer follows the schema either way."""


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
        """The forms that are set, by name."""
        forms = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return {name: form for name, form in forms.items() if form is not None}


INT31 = 2**31 - 1
"""Largest count a request may ask for."""
_INT63 = 2**63
_MAX_TIMEOUT = 86400
_MAX_BAD_WORD_CHARACTERS = 256
_MAX_BAD_WORDS_CHARACTERS = 4096
"""Most characters of all words together: each sequence of a request sends their tokens to the engine core."""

Logprobs = Annotated[int, Between(0, MAX_LOGPROBS)]
"""Number of alternatives whose log probabilities a request asks for."""


def _short_words(value: list[str]) -> list[str]:
    if not all(0 < len(word) <= _MAX_BAD_WORD_CHARACTERS for word in value):
        raise rule(f"each of its strings must have between 1 and {_MAX_BAD_WORD_CHARACTERS} characters")
    if (together := sum(map(len, value))) > _MAX_BAD_WORDS_CHARACTERS:
        raise rule(f"its strings may have {_MAX_BAD_WORDS_CHARACTERS} characters together, and have {together}")
    return value


def _not_empty(value: list[int]) -> list[int]:
    if not value:
        raise rule("it must hold at least 1 token id")
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise rule("it must be -1 or at least 1")
    return value


TruncatePromptTokens: TypeAlias = Annotated[int, Between(-1, INT31), AfterValidator(_not_zero)]
Priority: TypeAlias = Annotated[int, Between(-INT31 - 1, INT31)]
Timeout: TypeAlias = Annotated[float, Between(0, _MAX_TIMEOUT, low_open=True)]


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool = False
    """End the stream with a chunk that has no choices and the request's usage."""

    continuous_usage_stats: bool = False
    """With `include_usage`: report the usage so far in each chunk."""

    resumable: bool = False
    """Give each event an id, and store the stream when the connection is lost: the same request with the header
    `Last-Event-ID` gets the rest. The header `x-kaon-resumable: true` has the same effect."""

    include_obfuscation: bool = False
    """Accepted; changes nothing here."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return without_nulls(data)


class ModelRequest(RequestModel):
    """Base of requests that name a model."""

    model: str
    """Name of a served model, as `/v1/models` lists it."""


class SamplingFields(ModelRequest):
    """Fields of the requests that generate in OpenAI's APIs."""

    object_path = ""

    n: Annotated[int, Between(1, INT31)] = 1
    """Choices generated for each prompt."""

    temperature: Annotated[float, Between(0, 2)] | None = None
    """0 takes the most probable token; higher is more random.

    Default: the checkpoint's generation config, or else 1."""

    top_p: Annotated[float, Between(0, 1)] | None = None
    """Sample from the most probable tokens that together have this probability; 0 takes the most probable one.

    Default: the checkpoint's generation config, or else 1."""

    top_k: Annotated[int, Between(-1, INT31)] | None = None
    """Sample from this many of the most probable tokens; 0 or -1 takes all.

    Default: the checkpoint's generation config, or else 0."""

    min_p: Annotated[float, Between(0, 1)] | None = None
    """Exclude tokens less probable than this share of the most probable one.

    Default: the checkpoint's generation config, or else 0."""

    presence_penalty: Annotated[float, Between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Between(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Between(0.01, 10)] | None = None
    """Default: the checkpoint's generation config, or else 1."""

    logit_bias: Annotated[dict[str, Annotated[float, Between(-100, 100)]], FewFields] = {}  # noqa: RUF012 - copied
    """Values that are added to the logits of tokens, by token id."""

    seed: Annotated[int, Between(-_INT63, _INT63 - 1)] | None = None
    """Makes sampling reproducible. Choice `i` of a prompt is seeded with `seed + i`."""

    stop: StringOrStrings = []  # noqa: RUF012
    """End before any of these strings."""

    stop_token_ids: Items[int] = []  # noqa: RUF012
    """End at any of these tokens."""

    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""

    min_tokens: Annotated[int, Between(0, INT31)] = 0
    """Let neither EOS nor stops end the text before this many tokens."""

    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""

    skip_special_tokens: bool = True
    """Remove special tokens from the text."""

    allowed_token_ids: Annotated[Items[int], AfterValidator(_not_empty)] | None = None
    """Sample these tokens only."""

    bad_words: Annotated[Items[str], AfterValidator(_short_words)] = []  # noqa: RUF012
    """Texts that must not be written as a word or at the beginning of one."""

    structured_outputs: StructuredOutputs | None = None
    """Constrain the answer to a JSON schema, a regular expression, a choice of texts or a grammar."""

    guided_json: dict[str, Any] | str | None = None
    """Older name of `structured_outputs.json`."""

    guided_regex: str | None = None
    """Older name of `structured_outputs.regex`."""

    guided_choice: Items[str] | None = None
    """Older name of `structured_outputs.choice`."""

    guided_grammar: str | None = None
    """Older name of `structured_outputs.grammar`."""

    prompt_logprobs: Logprobs | None = None
    """Report the log probability of each prompt token and of this many of the most probable alternatives."""

    truncate_prompt_tokens: TruncatePromptTokens | None = None
    """Truncate the prompt to this number of its last tokens; -1: to as many as fit."""

    return_token_ids: bool = False
    """Report the token ids of prompt and answer too."""

    return_tokens_as_token_ids: bool = False
    """Spell each token in log probabilities as `token_id:` and its id."""

    priority: Priority = 0
    """Requests with a lower value are served first, equal ones in order of arrival; values are clipped to -100 to
    100."""

    timeout: Timeout | None = None
    """Seconds that the answer may take, including waiting; a request that is not completed by then ends with a 408."""

    cache_salt: str | None = None
    """Share cached prefixes only with requests that have the same salt."""

    stream: bool = False
    """Answer with server-sent events, one chunk per step."""

    stream_options: StreamOptions | None = None

    user: Ignored | None = None


class AnswerHead(NamedTuple):
    """The first fields of every answer and of every chunk."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    system_fingerprint: str


class PromptTokenLogprob(msgspec.Struct):
    """One candidate for a position in the prompt."""

    logprob: float
    rank: int
    """Rank among all tokens by probability, from 1."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptTokenLogprob] | None]
"""By position and token id: the prompt's own token, then the most probable ones. Null for the first position."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    """Tokens of reasoning."""


class Usage(msgspec.Struct):
    """Tokens of a request's prompts and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Present if the model's reasoning is separated from its answer."""
