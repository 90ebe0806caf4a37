"""`InputOutputProcessor`: requests in, checked and tokenised, before the engine sees them; results out.

Called by the server's routes and by `LLMEngine`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from engine.chat_template import ChatTemplate
from engine.messages import AddRequest, ModelInfo
from engine.request_state import RequestResult, RequestState
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


class InvalidRequest(ValueError):
    """A request that cannot run: one sentence with field, value and limit. `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class InputOutputProcessor:
    """Turns prompts into `AddRequest`s and engine outputs into text, for one loaded model.

    Holds no request: `start` gives each sequence's state to its caller. All methods may be called from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, model: ModelInfo) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._vocab_size = model.vocab_size
        self._context = model.max_model_len
        self._cache = model.block_size * model.num_kvcache_blocks

    def preprocess(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: int,
        cache_salt: int | None = None,
        clip_max_tokens: bool = False,
    ) -> AddRequest:
        """The message that asks the core for one sequence. Raises `InvalidRequest`.

        `max_tokens` beyond what context and cache leave is refused; with `clip_max_tokens`, which is for a default
        that nobody asked for, it is cut to the rest.
        """
        if not isinstance(prompt, str | list):
            raise InvalidRequest(
                f"prompt is of type {type(prompt).__name__}; it must be text or a list of token ids", "prompt"
            )
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        self._check_token_ids(token_ids, "prompt")
        self._check_token_ids(params.stop_token_ids or (), "stop_token_ids")
        self._check_token_ids(params.logit_bias or (), "logit_bias")
        params = self._fit(params, len(token_ids), clip_max_tokens)
        return AddRequest(request_id, token_ids, params, cache_salt=cache_salt)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the checkpoint adds to a prompt (BOS). Raises `InvalidRequest`."""
        self._check_length(text)
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise InvalidRequest(f"prompt cannot be tokenised: {error}", "prompt") from error

    def tokenize_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a chat, through the model's template; it may take long, see `ChatTemplate`.

        Raises `InvalidRequest`.
        """
        return self.tokenize(self.render_chat(messages, tools, add_generation_prompt, **variables), False)

    def render_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a chat, as the model's template writes it. Raises `InvalidRequest`."""
        if self.chat_template is None:
            raise InvalidRequest(
                "messages cannot be rendered: this model has no chat template; send a prompt to /v1/completions",
                "messages",
            )
        try:
            return self.chat_template.render(messages, tools, add_generation_prompt, **variables)
        except ValueError as error:
            raise InvalidRequest(str(error), "messages") from error

    def start(
        self,
        request: AddRequest,
        arrival_time: float | None = None,
        visible_token_ids: frozenset[int] = frozenset(),
    ) -> RequestState:
        """The state to push the outputs of `request` to. `arrival_time` on `time.monotonic`'s clock; default: now.

        Of the special tokens, the text shows `visible_token_ids` even where it skips the others.
        """
        return RequestState(request, self.tokenizer, arrival_time, visible_token_ids)

    def postprocess(self, completed: Iterable[RequestState]) -> dict[int, RequestResult]:
        """The results of completed sequences, by request id."""
        return {state.request_id: state.result() for state in completed}

    def _check_length(self, text: str) -> None:
        """Raise if no tokenisation of `text` could fit: that of megabytes takes seconds, and 200 bytes a token."""
        if len(text) > min(self._context, self._cache):
            self._room(-(-len(text) // self.tokenizer.longest_token), "at least ")

    def _check_token_ids(self, token_ids: Iterable[int], field: str) -> None:
        """Raise unless each is an int (a bool is none) and within the model's vocabulary."""
        if not set(map(type, token_ids)) <= {int}:
            wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
            raise InvalidRequest(f"{field} holds {wrong!r}; token ids must be integers", field)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"{field} holds token id {wrong}; this model's token ids are between 0 and {self._vocab_size - 1}",
                field,
            )

    def _fit(self, params: SamplingParams, prompt_tokens: int, clip_max_tokens: bool) -> SamplingParams:
        """`params` with a completion that fits behind the prompt."""
        room = self._room(prompt_tokens)
        if params.max_tokens <= room:
            return params
        field, value = ("min_tokens", params.min_tokens) if clip_max_tokens else ("max_tokens", params.max_tokens)
        if value > room:
            raise InvalidRequest(
                f"{field} is {value}, but after a prompt of {prompt_tokens} tokens {self._limit_in_words()} "
                f"leaves room for {room}; lower {field} or shorten the prompt",
                field,
            )
        return msgspec.structs.replace(params, max_tokens=room)

    def _room(self, prompt_tokens: int, how_exact: str = "") -> int:
        """Most tokens that can follow a prompt of this length; at least one."""
        if not prompt_tokens:
            raise InvalidRequest("prompt is empty; it must have at least 1 token", "prompt")
        room = min(self._context, self._cache) - prompt_tokens
        if room < 1:
            raise InvalidRequest(
                f"prompt has {how_exact}{prompt_tokens} tokens, but {self._limit_in_words()} leaves room for at most "
                f"{min(self._context, self._cache) - 1} and one generated token; shorten the prompt",
                "prompt",
            )
        return room

    def _limit_in_words(self) -> str:
        if self._cache < self._context:
            return f"the KV cache of {self._cache} tokens"
        return f"the model's context of {self._context} tokens"
