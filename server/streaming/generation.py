"""`Generation`: runs the sequences of one HTTP request, from admission to the last event or the complete answer.

The route that created the sequences calls `respond`; a background response iterates over `events`. The Python API,
which has no HTTP request, calls `complete`, `events` or `deltas`.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.config.config import Config
from engine.messages import AddRequest, TokenLogprobs
from engine.text.io_processor import NewSequence
from engine.text.request_state import RequestDelta, RequestState
from server.access_log import RequestFacts, facts_of
from server.errors import ApiError, BadRequest, EngineError, Overloaded, RequestTimeout, SlowReader
from server.limits.owners import ANYONE, Owner
from server.schemas.generation import PromptTokensDetails, Usage
from server.streaming.hub import Consumer, DeltaStream, Hub, WholeResult
from server.streaming.logprob_room import HeldLogprobs, bytes_for_logprobs, num_logprob_bytes, num_logprobs
from server.streaming.resumable import ResumableStreams
from server.streaming.sse import PIECE_BYTES, EventStream, Renderer, encode, in_slices, json_response, while_connected

_log = logging.getLogger(__name__)

Rendered = TypeVar("Rendered")

_MAX_PROMPT_LOGPROBS, _MAX_OF_SEVERAL_PROMPTS = 2**22, 2**20
"""Most log probabilities of prompts in an answer that has those of one prompt once, and in any other. They are at
least 88 and 22 MB of text. Joining a text holds the interpreter's lock, so requests that clients can split have the
lower bound."""

_MAX_ANSWER_LOGPROBS = 2**22
"""Most log probabilities of tokens in a whole answer. Until it is sent they take at least 70 bytes each."""

_MAX_REPEATED_LOGPROBS = 2**20
"""Most log probabilities of tokens in a stream whose last events repeat them all: those of a response four times."""

_MAX_UNREAD_BYTES = 2**29
"""Unread bytes of all streams, beyond which a stream that grows is ended if its owner holds an equal part of them.
They add up: a stream that is paused or complete holds no slot of the engine, so that another one runs. The prompts of
such streams count too."""

_PROMPT_TOKEN_BYTES = 36
"""Bytes of a token of a prompt: an entry of a list, and an integer."""

_MANY_LOGPROBS = 4096
"""More log probabilities are rendered in a thread, so that other streams continue meanwhile."""

MANY_SEQUENCES = 64
"""More sequences of a request are created, and their answer is rendered, in a thread: 2048 take 20 ms each."""


class Generation:
    """The sequences of one request: choice `i` of prompt `p` is number `p * n + i`."""

    def __init__(
        self,
        hub: Hub,
        config: Config,
        sequences: Sequence[NewSequence],
        n: int,
        *,
        best_of: int | None = None,
        prompt_copies: int = 1,
        owner: Owner = ANYONE,
        timeout: float | None = None,
    ) -> None:
        """`sequences` lists the choices of the first prompt, then those of the second and so on: each `best_of` or
        else `n`.

        With `best_of`, the answer has the `n` choices with the highest mean log probability; the sampling parameters
        must request log probabilities. The answer has the log probabilities of each prompt `prompt_copies` times.
        `timeout` is the request's own limit in seconds. Raises `BadRequest`.
        """
        self._num_choices = best_of or n
        self._num_answered = n
        self._prompt_copies = prompt_copies
        firsts = [sequence.request for sequence in sequences[:: self._num_choices]]
        reported = [_num_prompt_logprobs(first) for first in firsts] * prompt_copies
        most, exception = _MAX_PROMPT_LOGPROBS, ""
        if len(reported) > 1:
            most, exception = _MAX_OF_SEVERAL_PROMPTS, f" ({_MAX_PROMPT_LOGPROBS} for one choice of one prompt)"
        if sum(reported) > most:
            raise BadRequest(
                f"the prompts have {sum(reported)} log probabilities to report, of each token and its alternatives; a "
                f"request may ask for at most {most}{exception}; send fewer tokens, prompts, choices or alternatives "
                "at a time",
                param="logprobs",
            )
        params = firsts[0].sampling_params
        self._prompt_bytes = _PROMPT_TOKEN_BYTES * sum(len(each.prompt_token_ids) for each in firsts)
        self._held_prompt_bytes = 0
        """Bytes of the prompts that are counted as unread, while the stream is paused or only waits for its reader."""
        self._prompt_logprob_bytes = 0
        if (alternatives := params.prompt_logprobs) is not None:
            num_tokens = sum(len(each.prompt_token_ids) for each in firsts)
            self._prompt_logprob_bytes = bytes_for_logprobs(num_tokens, alternatives)
        self._held: HeldLogprobs | None = None
        """Log probabilities that are counted as the owner's."""
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self._may_be_large = has_logprobs or len(sequences) > MANY_SEQUENCES
        self._hub = hub
        self._settings = config.server_config
        self._sequences = sequences
        self._states = [sequence.state for sequence in sequences]
        self._queued_tokens = [
            # The choices of a prompt share its blocks in the prefix cache, so the prompt is computed only once.
            0 if index % self._num_choices and config.enable_prefix_caching else state.num_prompt_tokens
            for index, state in enumerate(self._states)
        ]
        self._arrival_time = self._submit_time = self._states[0].arrival_time
        self._owner = owner
        timeouts = [each for each in (timeout, self._settings.request_timeout) if each is not None]
        self._timeout = min(timeouts, default=math.inf)
        self._deadline: asyncio.TimerHandle | None = None
        self._stream: DeltaStream | None = None
        """Deltas of a streamed answer, with the number of bytes that its client has not read."""
        self._facts = RequestFacts()
        self._id: str | None = None
        """Id of the answer while the sequences run; None before and after."""

    async def respond(
        self, http: Request, renderer: Renderer, *, stream: bool, held_by: ResumableStreams | None = None
    ) -> Response:
        """Run the sequences and return the response. They are aborted as soon as the client disconnects.

        `held_by` stores the stream if it is resumable, so that it outlives its connection. Raises `Overloaded` and
        other `ApiError`s; once a stream has begun, it reports errors as events instead.
        """
        if stream:
            self._facts = facts_of(http.scope)
            if held_by is not None:
                return held_by.begin(renderer.head.id, self._owner, self.events(renderer), self.end, self._facts)
            return EventStream(self.events(renderer), self.end, renderer.ping)
        try:
            await self.complete(renderer.head.id, http)
            if self._may_be_large:
                content = await self._render(lambda: encode(in_slices(self.whole(renderer))), self._states)
            else:
                content = encode(self.whole(renderer))
        finally:
            self._release_logprobs()
        return json_response(content)

    async def complete(self, id: str, http: Request | None = None) -> list[RequestState]:
        """Run the sequences to their end, and return their states. `id` is the id of the answer.

        Raises `Overloaded` and other `ApiError`s, and `ClientDisconnect` if the client of `http` disconnects.
        """
        if http is None:
            results = WholeResult(len(self._states))
        else:
            self._facts = facts_of(http.scope)
            results = WholeResult(len(self._states), self._count_logprobs(), lambda: self._hub.cancel(self._states))
        self._begin(id, results, held_logprob_bytes=0 if http is None else self._most_logprob_bytes())
        try:
            async with nullcontext() if http is None else while_connected(http.receive):
                await results.wait()
        finally:
            self.end()
        return self._states

    async def deltas(self, id: str) -> AsyncGenerator[Mapping[int, RequestDelta], None]:
        """Submit the sequences and yield the deltas since the last iteration, by index of the sequence.

        Closing the generator aborts the sequences. Raises `Overloaded` and other `ApiError`s.
        """
        stream = self._new_stream()
        self._begin(id, stream)
        remaining = len(self._states)
        try:
            while remaining:
                deltas = await stream.take()
                remaining -= sum(delta.finished for delta in deltas.values())
                yield deltas
        finally:
            self.end()

    @property
    def usage(self) -> Usage:
        """Return the token counts of all choices so far."""
        return usage_of(self._states, self._num_choices)

    def whole(self, renderer: Renderer) -> msgspec.Struct:
        """Render the answer once all sequences have ended."""
        return renderer.whole(self._answered(), self.usage)

    def events(self, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """Submit the sequences and yield the events of the stream, joined if several are ready.

        Raises `Overloaded` and other `ApiError`s before the first event; a later failure becomes the last event. The
        caller must call `end`, even if it iterates over no event.
        """
        for state in self._states:
            state.logprobs = None  # The events have them, and nothing else needs them.
        stream = self._new_stream()
        held_bytes = self._most_logprob_bytes(of_tokens=renderer.repeats_logprobs)
        self._begin(renderer.head.id, stream, held_logprob_bytes=held_bytes)
        return self._events(renderer, stream)

    async def _events(self, renderer: Renderer, stream: DeltaStream) -> AsyncGenerator[bytes, None]:
        try:
            if opening := renderer.opening():
                yield opening
            remaining, num_repeated = len(self._states), 0
            while True:
                deltas = await stream.take()
                if renderer.repeats_logprobs:
                    num_repeated += sum(num_logprobs(delta.logprobs) for delta in deltas.values())
                    if num_repeated > _MAX_REPEATED_LOGPROBS:
                        raise _many_logprobs("stream", _MAX_REPEATED_LOGPROBS)
                    self._grow(sum(num_logprob_bytes(delta.logprobs) for delta in deltas.values()))
                if self._may_be_large:
                    # The events that end a choice repeat its log probabilities.
                    num_again = num_repeated if any(delta.finished for delta in deltas.values()) else 0
                    events = await self._render(partial(_chunks, renderer, deltas), deltas.values(), num_again)
                else:
                    events = _chunks(renderer, deltas)
                for delta in deltas.values():
                    remaining -= delta.finished
                if not remaining:
                    break
                if events:
                    yield events
            if len(events) > PIECE_BYTES:
                yield events
                events = b""
                # Creating megabytes of events took a while: let the event loop serve others before more follow.
                await asyncio.sleep(0)
            yield events + renderer.closing(self.usage)
        except ApiError as error:
            self._facts.error = str(error)
            yield renderer.failure(error)
        except Exception as error:  # noqa: BLE001 - reported to the client, which waits for it
            _log.exception("stream %s failed", renderer.head.id)
            self._facts.error = f"the stream failed: {error}"
            yield renderer.failure(EngineError(f"the stream failed: {error}"))
        finally:
            self.end()

    async def _render(
        self, work: Callable[[], Rendered], rendered: Collection[RequestState | RequestDelta], num_again: int = 0
    ) -> Rendered:
        """Run `work`, which renders these states or deltas, and `num_again` earlier log probabilities; in the thread
        for large answers if it takes long."""
        count = num_again + sum(
            num_logprobs(each.logprobs) + self._prompt_copies * num_logprobs(each.prompt_logprobs) for each in rendered
        )
        if count > _MANY_LOGPROBS or len(self._states) > MANY_SEQUENCES:
            return await self._hub.answers.run(self._owner, work)
        return work()

    def _answered(self) -> list[RequestState]:
        """Return the choices of the answer. Prompt log probabilities, computed for the first choice, are copied to the
        others."""
        answered: list[RequestState] = []
        for first in range(0, len(self._states), self._num_choices):
            choices = self._states[first : first + self._num_choices]
            for state in choices:
                state.prompt_logprobs = choices[0].prompt_logprobs
            if self._num_answered < self._num_choices:
                choices = sorted(choices, key=_mean_logprob, reverse=True)[: self._num_answered]
            answered += choices
        return answered

    def _new_stream(self) -> DeltaStream:
        accounts, party = self._hub.admission.accounts, self._owner.party
        self._stream = DeltaStream(
            lambda: 0 if self._is_crowded else self._settings.stream_buffer_bytes,
            self._on_full,
            self._on_drained,
            lambda num_bytes: accounts.change(party, "stream_bytes", num_bytes),
            lambda: self._hold_prompts(self._prompt_bytes),
            len(self._states),
        )
        return self._stream

    # -- begin and end ------------------------------------------------------------------------------------------

    def _begin(self, id: str, consumer: Consumer, *, held_logprob_bytes: int = 0) -> None:
        """Submit the sequences if they are admitted. Raises an `ApiError`, and then nothing has changed.

        `held_logprob_bytes`: most bytes of log probabilities that stay in memory until the answer is complete.
        """
        hub, count = self._hub, len(self._states)
        seconds = self._arrival_time + self._timeout - time.monotonic()
        if seconds <= 0:
            hub.metrics.received(count)
            hub.metrics.rejected("timeout", count)
            raise RequestTimeout.after(self._timeout)
        self._submit_time = time.monotonic()
        if held_logprob_bytes:
            try:
                self._hold_logprobs(consumer, held_logprob_bytes)
            except Overloaded as error:
                hub.metrics.received(count)
                hub.admission.refuse(self._owner, "logprobs", error, count)
        try:
            tally = hub.admission.admit(self._owner, self._queued_tokens)
            try:
                hub.submit(self._sequences, self._queued_tokens, consumer, tally)
            except BaseException:
                hub.admission.release(self._owner)
                raise
        except BaseException:
            self._release_logprobs()
            raise
        self._id = id
        if seconds < math.inf:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._on_deadline, consumer)

    def _on_deadline(self, consumer: Consumer) -> None:
        """End the running sequences. If none runs, the answer only waits for a slow reader, and is not late."""
        if self._hub.cancel(self._states, "timeout"):
            consumer.fail(RequestTimeout.after(self._timeout))

    def _count_logprobs(self) -> Callable[[Sequence[TokenLogprobs]], None]:
        """Return a function that counts further log probabilities of a whole answer. It raises an `ApiError` if the
        answer has too many, or if all answers have."""
        count = 0

        def add(positions: Sequence[TokenLogprobs]) -> None:
            nonlocal count
            count += num_logprobs(positions)
            if count > _MAX_ANSWER_LOGPROBS:
                raise _many_logprobs("answer", _MAX_ANSWER_LOGPROBS, ", or for a stream")
            self._grow(num_logprob_bytes(positions))

        return add

    def _most_logprob_bytes(self, *, of_tokens: bool = True) -> int:
        """Return the bytes that the log probabilities of the prompts, and by default of the tokens, have at most."""
        alternatives = self._sequences[0].request.sampling_params.logprobs
        if alternatives is None or not of_tokens:
            return self._prompt_logprob_bytes
        num_tokens = sum(each.request.sampling_params.max_tokens for each in self._sequences)
        num_tokens = min(num_tokens, _MAX_ANSWER_LOGPROBS // (1 + alternatives))
        return self._prompt_logprob_bytes + bytes_for_logprobs(num_tokens, alternatives)

    def _hold_logprobs(self, consumer: Consumer, most_bytes: int) -> None:
        """Count the log probabilities of this answer until `_release_logprobs`. Raises `Overloaded`."""
        hub, states = self._hub, self._states

        def end(error: ApiError) -> None:
            hub.cancel(states)
            if isinstance(consumer, DeltaStream):
                consumer.close()
            consumer.fail(error)

        held = HeldLogprobs(self._owner.party, most_bytes, lambda: hub.pause(states), lambda: hub.resume(states), end)
        hub.logprobs.admit(held, self._prompt_logprob_bytes)
        self._held = held

    def _grow(self, num_bytes: int) -> None:
        """Count `num_bytes` more log probabilities. Raises `Overloaded` if that ends this answer."""
        if self._held is not None:
            self._hub.logprobs.grow(self._held, num_bytes)

    def _release_logprobs(self) -> None:
        if self._held is not None:
            self._hub.logprobs.release(self._held)
            self._held = None

    @property
    def _is_crowded(self) -> bool:
        """Whether too much is unread in all streams, and this owner holds its equal part of it."""
        accounts = self._hub.admission.accounts
        return accounts.is_crowded_by(self._owner.party, "stream_bytes", _MAX_UNREAD_BYTES)

    def _on_full(self, stream: DeltaStream) -> None:
        """Pause or end the sequences because the client reads `stream` too slowly."""
        is_crowded = self._is_crowded
        action = "end" if is_crowded else self._settings.slow_readers
        self._hub.metrics.slow_reader(action)
        if action == "pause":
            self._hub.pause(self._states)
            self._hold_prompts(self._prompt_bytes)
            if self._held is not None:
                self._hub.logprobs.read(self._held, False)
        elif self._hub.cancel(self._states):
            held = f"at most about {self._settings.stream_buffer_bytes} bytes for a reader (stream_buffer_bytes)"
            if is_crowded:
                stream.close()
                held = f"about {_MAX_UNREAD_BYTES} bytes for all readers, and this key or address has its part of them"
            stream.fail(SlowReader(f"the stream was read too slowly: this server holds {held}"))

    def _hold_prompts(self, num_bytes: int) -> None:
        """Count `num_bytes` of prompts as unread: the queue no longer counts them, and cached ones cost nothing."""
        added, self._held_prompt_bytes = num_bytes - self._held_prompt_bytes, num_bytes
        self._hub.admission.accounts.change(self._owner.party, "stream_bytes", added)

    def _on_drained(self) -> None:
        """Resume the sequences because the client has read everything."""
        self._hold_prompts(0)
        if self._held is not None:
            self._hub.logprobs.read(self._held, True)
            if self._held.is_suspended:
                return
        self._hub.resume(self._states)

    def end(self) -> None:
        """Abort the sequences that still run, and log the request. Idempotent."""
        if self._id is None:
            return
        id, self._id = self._id, None
        if self._stream is not None:
            self._stream.close()
            self._hold_prompts(0)
            self._release_logprobs()
            self._stream = None  # It refers to this object: the two would wait for a garbage collection.
        if self._deadline is not None:
            self._deadline.cancel()
        self._hub.cancel(self._states)
        self._hub.admission.release(self._owner)
        facts, usage = self._facts, self.usage
        facts.prompt_tokens, facts.output_tokens = usage.prompt_tokens, usage.completion_tokens
        facts.cached_tokens = usage.prompt_tokens_details.cached_tokens
        facts.ttft = min((state.ttft for state in self._states if state.token_ids), default=None)
        facts.finish_reason = self._states[0].finish_reason or "abort"
        if facts.trace is not None:
            params = self._sequences[0].request.sampling_params
            facts.trace.generated(self._states, params, facts.model, self._submit_time)
        _log.debug("%s: %d choices, %.3f s", id, len(self._states), time.monotonic() - self._arrival_time)


def _many_logprobs(what: str, most: int, remedy: str = "") -> BadRequest:
    return BadRequest(
        f"the {what} has more than {most} log probabilities, of each token and its alternatives; ask for fewer "
        f"choices, tokens or alternatives at a time{remedy}",
        param="logprobs",
    )


def usage_of(states: Sequence[RequestState], num_choices: int) -> Usage:
    """Count the tokens of all choices. Each run of `num_choices` choices shares a prompt, which counts once."""
    firsts = states[::num_choices]
    prompt_tokens = sum(state.num_prompt_tokens for state in firsts)
    completion_tokens = sum(len(state.token_ids) for state in states)
    cached = PromptTokensDetails(sum(state.num_cached_tokens for state in firsts))
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached)


def _chunks(renderer: Renderer, deltas: Mapping[int, RequestDelta]) -> bytes:
    return b"".join(renderer.chunk(index, delta) for index, delta in deltas.items())


def _num_prompt_logprobs(request: AddRequest) -> int:
    """Return the number of log probabilities that a prompt will have, of its tokens and their alternatives."""
    alternatives = request.sampling_params.prompt_logprobs
    return 0 if alternatives is None else len(request.prompt_token_ids) * (1 + alternatives)


def _mean_logprob(state: RequestState) -> float:
    logprobs = state.logprobs or ()
    return sum(token.logprob for token in logprobs) / max(1, len(logprobs))
