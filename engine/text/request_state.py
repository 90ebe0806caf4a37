"""`RequestState`: one live sequence on the front end, from engine outputs to text deltas and the final result.

`InputOutputProcessor` creates one per sequence; the server and `LLMEngine` push the sequence's outputs to it.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TypedDict

import msgspec

from engine.messages import RequestOutput, TokenLogprobs, openai_finish_reason
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer


class RequestDelta(msgspec.Struct, gc=False):
    """The part of a sequence that one engine step added."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids`, if the request asked for them."""
    finished: bool = False
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`, on the last delta only."""
    stop_reason: int | str | None = None
    """The stop string or the stop token's id that ended the sequence; None for EOS."""
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One entry for each prompt token after the first; in one delta only, if the request asked for them."""
    merged: list[tuple[str, int]] | None = None
    """The text and the number of tokens of each delta that was merged into this one."""

    @property
    def steps(self) -> list[tuple[str, int]]:
        """The text and the number of tokens of each engine step."""
        return [(self.text, len(self.token_ids))] if self.merged is None else self.merged


class RequestResult(TypedDict):
    """A completed sequence. Times are in seconds."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    """One entry for each prompt token after the first."""
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    num_tokens_input: int
    num_tokens_output: int
    num_cached_tokens: int
    ttft: float
    """Time from arrival to the first token; 0 without one."""
    tpot: float
    """Mean time per token after the first; 0 with fewer than two."""
    latency: float
    """Time from arrival to the last output."""


class RequestState:
    """Accumulates one sequence. `push` until a delta is `finished`, then `result`."""

    __slots__ = (
        "_counts", "_detokenizer", "_params", "_prompt_token_ids", "_texts", "_tokenizer", "_visible_token_ids",
        "arrival_time", "error", "finish_reason", "first_token_time", "interruptions", "last_time", "logprobs",
        "num_cached_tokens", "num_prompt_tokens", "prompt_logprobs", "queue_time", "request_id", "stop_reason",
        "stopped_early", "token_ids", "vector",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        arrival_time: float | None = None,
        visible_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`arrival_time` on `time.monotonic`'s clock; default: now.

        The text shows the special tokens `visible_token_ids` even if `params` skip special tokens.
        """
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._visible_token_ids = visible_token_ids
        self._detokenizer: IncrementalDetokenizer | None = None
        """Created at the first output: garbage collections visit the objects of all sequences that wait."""
        self._texts: list[str] = []
        self._counts: list[int] = []
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.vector: bytes | None = None
        """The vector of a pooled prompt, as little-endian float32."""
        self.error: str | None = None
        self.stopped_early = False
        """Whether a stop string ended the sequence before the core did; the caller of `push` must then abort it."""
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        # Times at which the engine core read tokens from the device, not those at which this process received them.
        self.first_token_time = 0.0
        self.last_time = self.arrival_time
        self.queue_time: float | None = None
        self.interruptions: tuple[tuple[str, float], ...] = ()
        """Interruptions, `preempted` or `engine N restarted`, each with its time on `time.monotonic`'s clock."""

    def push(self, output: RequestOutput) -> RequestDelta:
        """Add the output of one step. Must not be called again after a delta that is `finished`."""
        token_ids, logprobs = output.output_tokens, output.logprobs
        self._record_times(output)
        self.vector = output.vector
        detokenizer = self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = IncrementalDetokenizer(
                self._tokenizer, self._params, self._prompt_token_ids, self._visible_token_ids
            )
        shown = token_ids[:-1] if output.finished and self._hides_last_token(output) else token_ids
        text = detokenizer.push(shown, output.finished)
        if detokenizer.stopped is not None:
            count = detokenizer.num_tokens - len(self.token_ids)
            token_ids, logprobs = token_ids[:count], logprobs and logprobs[:count]
            self.stopped_early = not output.finished
            self.finish_reason, self.stop_reason = "stop", detokenizer.stopped
        elif output.finished:
            self.finish_reason = openai_finish_reason(output.finish_reason)
            self.stop_reason = _stop_token(output.finish_reason)
            self.error = output.error
        self._texts.append(text)
        self._counts.append(len(token_ids))
        self.token_ids += token_ids
        if logprobs and self.logprobs is not None:
            self.logprobs += logprobs
        if self.finish_reason is None:
            delta = RequestDelta(text, token_ids, logprobs)
        else:
            delta = RequestDelta(text, token_ids, logprobs, True, self.finish_reason, self.stop_reason, self.error)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs = output.prompt_logprobs
        return delta

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def steps(self) -> Iterator[tuple[str, int]]:
        """The text and the number of tokens of each engine step."""
        return zip(self._texts, self._counts, strict=True)

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; 0 before it."""
        return self.first_token_time - self.arrival_time if self.token_ids else 0.0

    @property
    def tpot(self) -> float:
        """Mean seconds a token after the first; 0 with fewer than two tokens."""
        after_first = len(self.token_ids) - 1
        return (self.last_time - self.first_token_time) / after_first if after_first > 0 else 0.0

    def result(self) -> RequestResult:
        """The sequence so far; the caller normally waits for the last delta."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "num_tokens_input": self.num_prompt_tokens,
            "num_tokens_output": len(self.token_ids),
            "num_cached_tokens": self.num_cached_tokens,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "latency": self.last_time - self.arrival_time,
        }

    def _record_times(self, output: RequestOutput) -> None:
        """Record the times and counts that `output` reports."""
        self.last_time = time.monotonic() if output.time is None else output.time
        if not self.token_ids and output.output_tokens:
            self.first_token_time = self.last_time
        if output.queue_time is not None:
            self.queue_time = output.queue_time
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens

    def _hides_last_token(self, output: RequestOutput) -> bool:
        """Whether the last token ended the sequence and stays out of the text.

        `skip_special_tokens` decides about special tokens. Other stop tokens are hidden, as stop strings are, unless
        `include_stop_str_in_output` is set.
        """
        reason = output.finish_reason
        if not output.output_tokens or (reason != "eos" and _stop_token(reason) is None):
            return False
        if self._params.include_stop_str_in_output:
            return False
        return output.output_tokens[-1] not in self._tokenizer.special_ids


def _stop_token(reason: str | None) -> int | None:
    """The id in the engine's finish reason `stop_{token_id}`; None for any other."""
    token_id = (reason or "").removeprefix("stop_")
    return int(token_id) if token_id.isdecimal() else None
