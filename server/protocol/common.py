"""What completions and chat share: the sampling fields of a request, and the usage of an answer."""

import hashlib
from typing import Annotated, NamedTuple

import msgspec

from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from server.errors import BadRequest
from server.protocol.rules import Between, FewFields, Ignored, Items, RequestModel, StringOrStrings

INT31 = 2**31 - 1
"""Largest count a request may ask for."""
_INT63 = 2**63


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool = False
    """End the stream with a chunk that has no choices and the request's usage."""

    include_obfuscation: bool = False
    """Accepted; changes nothing here."""


class SamplingFields(RequestModel):
    """Fields of every request that generates."""

    model: str
    """Name of a served model, as `/v1/models` lists it."""

    n: Annotated[int, Between(1, INT31)] = 1
    """Choices generated for each prompt."""

    temperature: Annotated[float, Between(0, 2)] = 1.0
    """0 takes the likeliest token; higher is more random."""

    top_p: Annotated[float, Between(0, 1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 0 takes the likeliest one."""

    top_k: Annotated[int, Between(-1, INT31)] = 0
    """Sample from this many likeliest tokens; 0 or -1 takes all."""

    min_p: Annotated[float, Between(0, 1)] = 0.0
    """Leave out tokens less likely than this share of the likeliest."""

    presence_penalty: Annotated[float, Between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Between(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Between(0.01, 10)] = 1.0

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

    cache_salt: str | None = None
    """Share cached prompts only with requests of the same salt."""

    stream: bool = False
    """Answer with server-sent events, a chunk a step."""

    stream_options: StreamOptions | None = None

    user: Ignored | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters. Raises `BadRequest` for what only shows in combination."""
        if self.min_tokens > max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {max_tokens}", param="min_tokens"
            )
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            stop_strings=self.stop or None,
            top_p=self.top_p or 1.0,
            top_k=self.top_k if self.top_p else 1,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()} or None,
            seed=self.seed,
            logprobs=logprobs,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids or None,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
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


Logprobs = Annotated[int, Between(0, MAX_LOGPROBS)]
"""How many alternatives' log probabilities a request asks for."""
