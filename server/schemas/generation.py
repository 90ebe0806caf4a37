"""Fields that give the answer a form: `response_format`, `structured_outputs` and its older, flat names."""

import hashlib
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from pydantic import AfterValidator, Field, model_validator

from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.text.io_processor import InputOutputProcessor
from server.errors import BadRequest
from server.schemas.body import Between, FewFields, Ignored, Items, RequestModel, StringOrStrings, rule, sentence

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


# [common] What completions and chat share: the sampling fields of a request, and the usage of an answer.

INT31 = 2**31 - 1
"""Largest count a request may ask for."""
_INT63 = 2**63
_MAX_TIMEOUT = 86400
_MAX_BAD_WORD_CHARACTERS = 256
_MAX_BAD_WORDS_CHARACTERS = 4096
"""All words together: they go to the engine's core as tokens, with each of a request's sequences."""

Logprobs = Annotated[int, Between(0, MAX_LOGPROBS)]
"""How many alternatives' log probabilities a request asks for."""


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


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool = False
    """End the stream with a chunk that has no choices and the request's usage."""

    continuous_usage_stats: bool = False
    """With `include_usage`: tell in each chunk what the request has used so far."""

    include_obfuscation: bool = False
    """Accepted; changes nothing here."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class SamplingFields(RequestModel):
    """Fields of every request that generates."""

    model: str
    """Name of a served model, as `/v1/models` lists it."""

    n: Annotated[int, Between(1, INT31)] = 1
    """Choices generated for each prompt."""

    temperature: Annotated[float, Between(0, 2)] | None = None
    """0 takes the likeliest token; higher is more random. Default: the checkpoint's generation config, or else 1."""

    top_p: Annotated[float, Between(0, 1)] | None = None
    """Sample from the likeliest tokens that together have this probability; 0 takes the likeliest one.

    Default: the checkpoint's generation config, or else 1."""

    top_k: Annotated[int, Between(-1, INT31)] | None = None
    """Sample from this many likeliest tokens; 0 or -1 takes all.

    Default: the checkpoint's generation config, or else 0."""

    min_p: Annotated[float, Between(0, 1)] | None = None
    """Leave out tokens less likely than this share of the likeliest.

    Default: the checkpoint's generation config, or else 0."""

    presence_penalty: Annotated[float, Between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Between(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Between(0.01, 10)] | None = None
    """Default: the checkpoint's generation config, or else 1."""

    logit_bias: Annotated[dict[str, Annotated[float, Between(-100, 100)]], FewFields] = {}  # noqa: RUF012 - copied
    """Added to the logits of tokens, by token id."""

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
    """Go on past the model's end-of-sequence tokens."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    allowed_token_ids: Annotated[Items[int], AfterValidator(_not_empty)] | None = None
    """Sample these tokens only."""

    bad_words: Annotated[Items[str], AfterValidator(_short_words)] = []  # noqa: RUF012
    """Texts that must not be written, at the beginning of a word or as one."""

    structured_outputs: StructuredOutputs | None = None
    """Hold the answer to a JSON schema, a regular expression, a choice of texts or a grammar."""

    guided_json: dict[str, Any] | str | None = None
    """Older name of `structured_outputs.json`."""

    guided_regex: str | None = None
    """Older name of `structured_outputs.regex`."""

    guided_choice: Items[str] | None = None
    """Older name of `structured_outputs.choice`."""

    guided_grammar: str | None = None
    """Older name of `structured_outputs.grammar`."""

    prompt_logprobs: Logprobs | None = None
    """Report the log probability of each prompt token and of this many likeliest alternatives."""

    truncate_prompt_tokens: Annotated[int, Between(-1, INT31), AfterValidator(_not_zero)] | None = None
    """Keep this many tokens of the prompt, its last ones; -1: as many as fit."""

    return_token_ids: bool = False
    """Report the token ids of prompt and answer too."""

    return_tokens_as_token_ids: bool = False
    """Spell each token in log probabilities as `token_id:` and its id."""

    priority: Annotated[int, Between(-INT31 - 1, INT31)] = 0
    """Lower is served first, equal ones in order of arrival; beyond -100 and 100 it counts as these."""

    timeout: Annotated[float, Between(0, _MAX_TIMEOUT, low_open=True)] | None = None
    """Seconds that the answer may take, waiting included; a request that is not done by then is ended with a 408."""

    cache_salt: str | None = None
    """Share cached prompts only with requests of the same salt."""

    stream: bool = False
    """Answer with server-sent events, a chunk a step."""

    stream_options: StreamOptions | None = None

    user: Ignored | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def sequences_per_prompt(self) -> int:
        """How many times each prompt is run."""
        return self.n

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives to compute of each prompt token; None: no log probabilities."""
        return self.prompt_logprobs

    def keep_last(self, processor: InputOutputProcessor, max_tokens: int) -> int | None:
        """Tokens to keep of a prompt that so many further ones must fit behind; None: all."""
        if self.truncate_prompt_tokens == -1:
            return processor.longest_prompt(max_tokens)
        return self.truncate_prompt_tokens

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, processor: InputOutputProcessor
    ) -> SamplingParams:
        """The engine's parameters. Raises `BadRequest` for what only shows in combination.

        The processor's defaults stand in for what the request leaves out. It also tokenises `bad_words`.
        """
        defaults = processor.defaults
        temperature = defaults.temperature if self.temperature is None else self.temperature
        top_p = defaults.top_p if self.top_p is None else self.top_p
        top_k = defaults.top_k if self.top_k is None else self.top_k
        repetition_penalty = self.repetition_penalty or defaults.repetition_penalty
        if self.min_tokens > max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {max_tokens}", param="min_tokens"
            )
        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            stop_strings=self.stop or None,
            top_p=top_p or 1.0,
            top_k=top_k if top_p else 1,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()} or None,
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_alternatives,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids or None,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=processor.tokenize_words(self.bad_words) or None,
        )

    @property
    def salt_key(self) -> int | None:
        """`cache_salt` as the 64-bit start of the prefix-hash chain."""
        if self.cache_salt is None:
            return None
        return int.from_bytes(hashlib.blake2b(self.cache_salt.encode(), digest_size=8).digest())


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """`params` for choice number `choice` of a prompt: with a seed, the seed plus `choice`, wrapped to 64 bits."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + _INT63) % (2 * _INT63) - _INT63
    return msgspec.structs.replace(params, seed=seed)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise BadRequest(f"logit_bias has the key {key[:40]!r}; keys must be token ids in decimal", param="logit_bias")
    return int(key)


class AnswerHead(NamedTuple):
    """What every answer, and every chunk of one, begins with."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    system_fingerprint: str


class PromptTokenLogprob(msgspec.Struct):
    """One candidate for a place in the prompt."""

    logprob: float
    rank: int
    """Place among all tokens by likelihood, from 1."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptTokenLogprob] | None]
"""By place in the prompt and token id: the prompt's own token, then the likeliest ones. Null for the first place."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    """Tokens of what the model thought before it answered."""


class Usage(msgspec.Struct):
    """Tokens that a request read and wrote, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Where the model's reasoning is told apart from its answer."""
