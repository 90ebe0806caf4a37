"""`/v1/completions`: the request and the whole answer. `server.routes.completions` writes the chunks of a stream."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import PlainValidator, model_validator

from server.schemas.body import MAX_ITEMS, Between, rule, sentence
from server.schemas.generation import INT31, Logprobs, PromptLogprobs, ResponseFormat, SamplingFields, Usage

Prompt: TypeAlias = str | list[int]


def to_prompts(value: Any) -> list[Prompt]:
    """The list of prompts. A list of integers is one prompt, any other list holds several."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise rule("it must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise rule("it must hold at least 1 prompt or token id")
    if _is_token_ids(value):
        return [value]
    if len(value) > MAX_ITEMS:
        raise rule(f"it may hold at most {MAX_ITEMS} prompts, and holds {len(value)} items")
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _is_token_ids(item)):
            raise rule(f"its item {index} must be a string or a list of token ids like its neighbours")
    return value


def _is_token_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(to_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ] = [""]  # noqa: RUF012
    """One prompt or several, each as text or as token ids; an empty text is the beginning-of-sequence token."""

    max_tokens: Annotated[int, Between(0, INT31)] = 16
    """Most tokens to generate; 0 only computes the prompt, for `echo` and its log probabilities."""

    logprobs: Logprobs | None = None
    """Report the log probability of each token and of this many of the most probable alternatives.

    An answer that is not streamed may have 4194304 of them in all its choices; with more it ends with a 400.
    """

    echo: bool = False
    """Begin the text with the prompt; with `logprobs`, report those of the prompt too."""

    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as BOS, to a text prompt."""

    best_of: Annotated[int, Between(1, INT31)] | None = None
    """Generate this many choices for each prompt and answer with the `n` of the highest mean log probability."""

    response_format: ResponseFormat | None = None
    """Form of the answer: free text, any JSON object, or JSON that a schema constrains."""

    suffix: str | None = None
    """Text after the generated text, for models that fill gaps: those whose tokenizer has marks for it."""

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise sentence(f"best_of is {self.best_of}; it must be at least n, {self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise sentence(f"best_of is {self.best_of}; a stream cannot choose the best, so it must equal n, {self.n}")
        return self

    @model_validator(mode="after")
    def _suffix_goes_with(self) -> "CompletionRequest":
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise sentence("truncate_prompt_tokens is set with suffix, whose marks must stay; leave one out")
        if self.suffix and self.echo and self.logprobs is not None:
            raise sentence(
                "logprobs is set with suffix and echo, but the echoed text is not the prompt that the model reads; "
                "leave one out"
            )
        return self

    @property
    def num_choices(self) -> int:
        """Choices that are generated for each prompt."""
        return self.best_of or self.n

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives to compute for each prompt token; None: no log probabilities."""
        echoed = self.logprobs if self.echo else None
        if echoed is None or self.prompt_logprobs is None:
            return self.prompt_logprobs if echoed is None else echoed
        return max(echoed, self.prompt_logprobs)

    @property
    def alternatives(self) -> int | None:
        """Alternatives to compute for each generated token; None: no log probabilities."""
        needs_logprobs = self.num_choices > self.n
        return 0 if self.logprobs is None and needs_logprobs else self.logprobs


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Index in `text` of each token's first character."""


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    """The stop string, or the id of the stop token, that ended the text."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
