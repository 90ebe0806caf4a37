"""`InputOutputProcessor`: converts prompts to sequences for the engine core, and completed sequences to results.

A prompt is rendered and tokenised, checked against the model's limits (`check`), and becomes one `NewSequence` for
each of its choices (`new_sequences`). The server calls these steps one by one, `LLMEngine` calls them together as
`preprocess`. Sequences that are pooled come from `engine.text.pooling`. `FillIn` writes fill-in-the-middle prompts for
code models.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from engine.messages import AddRequest, ModelInfo
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.process_watch import ProcessWatch
from engine.text.request_state import RequestResult, RequestState
from engine.text.template_sandbox import render_untrusted
from engine.text.tokenizer import Tokenizer


class _Marks(NamedTuple):
    """The marker tokens of a fill-in-the-middle prompt; each family of code models has its own."""

    prefix: str
    suffix: str
    middle: str | None
    """Mark of the gap; None if the prefix is last in the prompt, and the model continues it."""
    ends: tuple[str, ...] = ()
    """Tokens that end the completion, in addition to the model's EOS tokens."""
    suffix_first: bool = False


_FAMILIES = (
    # Qwen-Coder, CodeGemma, and others that use the same names.
    _Marks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder and Granite; SantaCoder.
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder, whose marks are written with fullwidth bars.
    _Marks("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    # CodeLlama.
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # Codestral, whose prompts begin with the suffix.
    _Marks("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)


class FillIn:
    """Writes the fill-in-the-middle prompts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, marks: _Marks) -> None:
        """Raises `KeyError` if the tokenizer lacks one of the marks."""
        self._tokenizer = tokenizer
        self._suffix_first = marks.suffix_first
        self._prefix, self._suffix = _id(tokenizer, marks.prefix), _id(tokenizer, marks.suffix)
        self._middle = [] if marks.middle is None else [_id(tokenizer, marks.middle)]
        ends = (tokenizer.token_id(end) for end in marks.ends)
        self.end_token_ids = [end for end in ends if end is not None]
        """Tokens at which to stop."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "FillIn | None":
        """Create it for the first family whose marks `tokenizer` has; None if there is none."""
        for marks in _FAMILIES:
            try:
                return cls(tokenizer, marks)
            except KeyError:
                continue
        return None

    def prompt(self, prefix: list[int], suffix: list[int], add_special_tokens: bool) -> list[int]:
        """Return the prompt for the text between `prefix` and `suffix`, both tokenised without special tokens."""
        before, after = [self._prefix, *prefix], [self._suffix, *suffix]
        opening = self._tokenizer.encode("") if add_special_tokens else []
        ordered = [*after, *before] if self._suffix_first else [*before, *after]
        return [*opening, *ordered, *self._middle]


def _id(tokenizer: Tokenizer, mark: str) -> int:
    token_id = tokenizer.token_id(mark)
    if token_id is None:
        raise KeyError(mark)
    return token_id


OPENAI_DEFAULTS = GenerationDefaults()

_RESYNC_CHARACTERS = 4096
"""Characters tokenised in front of the part that certainly has the last tokens, so that truncation does not change
these."""


class InvalidRequest(ValueError):
    """A request that cannot run. The message is a sentence with field, value and limit; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class DoesNotFit(InvalidRequest):
    """Prompt and completion are longer than the context or the cache; a shorter prompt may fit."""

    def __init__(
        self, message: str, param: str, prompt_tokens: int = 0, limit: int = 0, completion_tokens: int = 0
    ) -> None:
        """`completion_tokens` is 0 if the prompt alone is too long."""
        super().__init__(message, param)
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.completion_tokens = completion_tokens


class CheckedPrompt(NamedTuple):
    """A validated prompt with its parameters."""

    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """`params.max_tokens`, clipped to the room after the prompt if clipping applies."""


class NewSequence(NamedTuple):
    """A sequence for `CoreManager`."""

    request: AddRequest
    """The message that adds it."""
    state: RequestState
    """Accumulates its outputs."""


class InputOutputProcessor:
    """Converts prompts to sequences and engine outputs to text, for one loaded model.

    It stores no requests: callers own the sequences. Thread-safe.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        model: ModelInfo,
        defaults: GenerationDefaults = OPENAI_DEFAULTS,
        bos_token_id: int | None = None,
        *,
        clips_max_tokens: bool = False,
    ) -> None:
        """`defaults` are the values of sampling fields that requests do not set. `bos_token_id` defaults to the
        tokenizer's. `clips_max_tokens`: whether `check` clips every `max_tokens`.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.defaults = defaults
        self.bos_token_id = tokenizer.bos_token_id if bos_token_id is None else bos_token_id
        """Prompt of a completion with an empty prompt; None if an empty prompt is refused."""
        self.fill_in = FillIn.of(tokenizer)
        """Writer of fill-in-the-middle prompts; None if the tokenizer has no marks for them."""
        self._clips_max_tokens = clips_max_tokens
        self._vocab_size = model.vocab_size
        self._context = model.max_model_len
        self._cache = model.block_size * model.num_kvcache_blocks
        self._longest = min(self._context, self._cache)
        """Most tokens of a prompt and its completion together."""

    def preprocess(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: int,
        clip_max_tokens: bool = False,
        adapter: int = 0,
    ) -> NewSequence:
        """Create the sequence of a text or token ids: `tokenize`, `check`, `new_sequences`."""
        if not isinstance(prompt, str | list):
            raise InvalidRequest(
                f"prompt is of type {type(prompt).__name__}; it must be text or a list of token ids", "prompt"
            )
        # The caller may use its list for other prompts, or change it while the request is live.
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt.copy()
        checked = self.check(token_ids, params, clip_max_tokens=clip_max_tokens)
        [sequence] = self.new_sequences(checked, [request_id], adapter=adapter)
        return sequence

    def check(self, token_ids: list[int], params: SamplingParams, *, clip_max_tokens: bool = False) -> CheckedPrompt:
        """Check a prompt against vocabulary, context and cache. Raises `InvalidRequest`.

        `max_tokens` beyond the room of context and cache is refused. With `clip_max_tokens`, for a default that the
        client did not set, or `clips_max_tokens`, it is clipped to that room.
        """
        clip_max_tokens |= self._clips_max_tokens
        self._check_token_ids(token_ids, "prompt")
        self._check_token_ids(params.stop_token_ids or (), "stop_token_ids")
        self._check_token_ids(params.logit_bias or (), "logit_bias")
        self._check_token_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_token_ids(list(chain.from_iterable(params.bad_words or ())), "bad_words")
        for sequence in params.stop_token_sequences or ():
            self._check_token_ids(sequence, "stop_token_sequences")
        room = self._room(len(token_ids), min(1, params.max_tokens))
        field, value = ("min_tokens", params.min_tokens) if clip_max_tokens else ("max_tokens", params.max_tokens)
        if value > room:
            raise DoesNotFit(
                f"{field} is {value}, but {self._limit_in_words()}, which leaves room for {room} "
                f"after a prompt of {len(token_ids)} tokens; lower {field} or shorten the prompt",
                field,
                len(token_ids),
                self._longest,
                value,
            )
        return CheckedPrompt(token_ids, params, min(params.max_tokens, room))

    def check_pooled(self, token_ids: list[int]) -> None:
        """Raise `InvalidRequest` unless vocabulary, context and cache allow a prompt without a completion."""
        self._check_token_ids(token_ids, "prompt")
        self._room(len(token_ids), 0)

    def new_sequences(
        self,
        prompt: CheckedPrompt,
        request_ids: Iterable[int],
        *,
        grammar: str | None = None,
        cache_salt: int | None = None,
        priority: int = 0,
        adapter: int = 0,
        owner: str = "",
        weight: float = 1.0,
        arrival_time: float | None = None,
        visible_token_ids: frozenset[int] = frozenset(),
    ) -> list[NewSequence]:
        """Create the choices of a prompt, one per id. They share the list of its token ids.

        Choice `i` has the seed plus `i`. `visible_token_ids` and `arrival_time` as in `RequestState`.
        """
        token_ids, params, _ = prompt
        return [
            NewSequence(
                AddRequest(
                    id,
                    token_ids,
                    _core_params(prompt, choice, grammar),
                    cache_salt=cache_salt,
                    priority=priority,
                    adapter=adapter,
                    owner=owner,
                    weight=weight,
                ),
                RequestState(id, token_ids, params, self.tokenizer, arrival_time, visible_token_ids),
            )
            for choice, id in enumerate(request_ids)
        ]

    def tokenize(self, text: str, add_special_tokens: bool = True, keep_last: int | None = None) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the checkpoint adds (BOS). Raises
        `InvalidRequest`.

        With `keep_last`, return at most that number: the special tokens in front of the text, and the text's last
        tokens.
        """
        if keep_last is None or keep_last > self.longest_prompt():
            self.check_length(len(text))
        else:
            text = text[-(keep_last * self.tokenizer.longest_token + _RESYNC_CHARACTERS) :]
        try:
            token_ids = self.tokenizer.encode(text, add_special_tokens)
            if keep_last is None or len(token_ids) <= keep_last:
                return token_ids
            bare = self.tokenizer.encode(text, add_special_tokens=False)
        except ValueError as error:
            raise InvalidRequest(f"prompt cannot be tokenised: {error}", "prompt") from error
        opening = token_ids[: len(token_ids) - len(bare)]
        if len(opening) >= keep_last or opening + bare != token_ids:
            return token_ids[-keep_last:]
        return opening + bare[len(opening) - keep_last :]

    def tokenize_words(self, words: Iterable[str]) -> list[list[int]]:
        """Return the token sequences of each word, alone and after a space. Raises `InvalidRequest`."""
        stripped = [word.lstrip() for word in words]
        if not stripped:
            return []
        texts = [*stripped, *(" " + word for word in stripped)]
        try:
            encoded = self.tokenizer.encode_all(texts, add_special_tokens=False)
        except ValueError as error:
            raise InvalidRequest(f"bad_words cannot be tokenised: {error}", "bad_words") from error
        sequences = []
        for bare, spaced in zip(encoded, encoded[len(stripped) :], strict=False):
            sequences += [bare] if bare else []
            # If the space is a separate token, the word's tokens are equal, and the first sequence covers them.
            if spaced and spaced[-len(bare) :] != bare:
                sequences.append(spaced)
        return sequences

    def longest_prompt(self, completion_tokens: int = 0) -> int:
        """Return the length of the longest prompt that leaves room for `completion_tokens`; at least 1."""
        return max(1, self._longest - completion_tokens)

    def render_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the text of a chat with the model's template. Raises `InvalidRequest`."""
        if self.chat_template is None:
            raise InvalidRequest(
                "messages cannot be rendered: this model has no chat template; send a prompt to /v1/completions",
                "messages",
            )
        try:
            return self.chat_template.render(messages, tools, add_generation_prompt, **variables)
        except ValueError as error:
            raise InvalidRequest(str(error), "messages") from error

    def render_chat_with(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        watch: ProcessWatch | None = None,
    ) -> str:
        """Render the text of a chat with the request's template, in a sandbox. Raises `InvalidRequest`.

        `watch` as in `render_untrusted`."""
        special_tokens = self.tokenizer.special_tokens
        try:
            return render_untrusted(template, special_tokens, messages, tools, add_generation_prompt, variables, watch)
        except ValueError as error:
            raise InvalidRequest(str(error), "chat_template") from error

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`, including special tokens. Raises `InvalidRequest`."""
        if len(token_ids) > self._context:
            raise InvalidRequest(
                f"tokens holds {len(token_ids)} token ids; it may hold {self._context}, the model's context", "tokens"
            )
        self._check_token_ids(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def postprocess(self, completed: Iterable[RequestState]) -> dict[int, RequestResult]:
        """Return the results of completed sequences by request id."""
        return {state.request_id: state.result() for state in completed}

    def check_length(self, num_characters: int) -> None:
        """Raise if a text of `num_characters` characters is too long for any tokenisation. This avoids tokenising
        megabytes, which takes seconds and 200 bytes per token."""
        if num_characters > self._longest:
            self._room(-(-num_characters // self.tokenizer.longest_token), 0, "at least ")

    def _check_token_ids(self, token_ids: Iterable[int], field: str) -> None:
        """Raise unless each id is an int, not a bool, and within the model's vocabulary."""
        if not set(map(type, token_ids)) <= {int}:
            wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
            raise InvalidRequest(f"{field} holds {wrong!r}; token ids must be integers", field)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"{field} holds token id {wrong}; this model's token ids are between 0 and {self._vocab_size - 1}, "
                f"its vocabulary's size is {self._vocab_size}",
                field,
            )

    def _room(self, prompt_tokens: int, least: int, how_exact: str = "") -> int:
        """Return the most tokens that can follow a prompt of this length. Raises if they are fewer than `least`, 0 or
        1."""
        if not prompt_tokens:
            raise InvalidRequest("prompt is empty; it must have at least 1 token", "prompt")
        room = self._longest - prompt_tokens
        if room < least:
            one = " and one generated token" if least else ""
            raise DoesNotFit(
                f"prompt has {how_exact}{prompt_tokens} tokens, but {self._limit_in_words()}, which leaves room for "
                f"at most {self._longest - least}{one}; shorten the prompt",
                "prompt",
                prompt_tokens,
                self._longest - least,
            )
        return room

    def _limit_in_words(self) -> str:
        if self._cache < self._context:
            return f"the KV cache holds {self._cache} tokens"
        # OpenAI's words, which clients search for.
        return f"this model's maximum context length is {self._context} tokens"


def _core_params(prompt: CheckedPrompt, choice: int, grammar: str | None) -> SamplingParams:
    """Return the parameters that the engine core needs for choice number `choice` of a prompt.

    Stop strings are removed, since the front end matches them, and they may be megabytes for each of many choices. The
    prompt's log probabilities are computed for the first choice only.
    """
    params, changes = prompt.params, dict[str, Any]()
    if prompt.max_tokens != params.max_tokens:
        changes["max_tokens"] = prompt.max_tokens
    if params.stop_strings is not None:
        changes["stop_strings"] = None
    if grammar is not None:
        changes["grammar"] = grammar
    if choice and params.prompt_logprobs is not None:
        changes["prompt_logprobs"] = None
    if choice and params.seed is not None:
        changes["seed"] = (params.seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, **changes) if changes else params
