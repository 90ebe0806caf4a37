"""`Journal`: what every live request needs to go on in another engine core. Kept by `Replica`.

A request's message and the tokens that were delivered are all of it: what is drawn is keyed by the request and the
position, a grammar is followed again along the tokens, and text is the front end's, which outlives the core.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from engine.messages import AddRequest, RequestOutput, StepOutputs, terminal_output

_MOST_CRASHES = 2
"""Successive ones that a request may have been in; then it is not tried again."""

_MOST_KILLS = 3
"""The same where the last core was killed from outside, which is a request's doing only if it took all memory."""

_MOST_LOSSES = 3
"""Successive cores that were lost with a request that is not suspected; then no other replica takes it over."""


class Place(Enum):
    """Where a live request is."""

    HERE = auto()
    """Not in the core: it waits for one to be ready, or is paused."""
    CORE = auto()
    LEAVING = auto()
    """Called back to be paused: the core still owes its last output, which nobody is told."""


class _Row(NamedTuple):
    """Successive times that something befell a request, without a token of its own between them."""

    times: int = 0
    tokens: int = -1
    """That it had the last time."""

    def again(self, tokens: int) -> "_Row":
        """Once more, when it had so many."""
        return _Row(1 if tokens > self.tokens else self.times + 1, tokens)


class Entry:
    """One live request."""

    __slots__ = (
        "_crashes", "_losses", "aborted", "paused", "place", "request", "sent_time", "steps_at_start",
        "token_ids", "tokens_at_start",
    )  # fmt: skip

    def __init__(self, request: AddRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        """Delivered so far."""
        self.place = Place.HERE
        self.paused = False
        self.aborted = False
        self._crashes = self._losses = _Row()
        self.sent_time = 0.0
        """When it was sent to the core where it is, on the monotonic clock."""
        self.tokens_at_start = 0
        """When it was brought to the core where it is."""
        self.steps_at_start = 0
        """Steps that cores had told of by then."""

    @property
    def crashes(self) -> int:
        """Successive ones that found it in a step, without a token of its own between them."""
        return self._crashes.times

    @property
    def losses(self) -> int:
        """Successive cores that were lost with it, in no step of it that is known, without a token between."""
        return self._losses.times

    @property
    def is_suspect(self) -> bool:
        """Whether it was in the step in which a core died, and has not had a token since."""
        return len(self.token_ids) == self._crashes.tokens

    @property
    def may_move(self) -> bool:
        """Whether another replica may go on with it: it is in no core, and does not take one after the other along."""
        progressed = len(self.token_ids) > self._losses.tokens
        return self.place is Place.HERE and (progressed or self.losses < _MOST_LOSSES)

    def message(self) -> AddRequest:
        """What has a core begin with it, or go on."""
        if not self.token_ids and not self.crashes:
            return self.request
        params = self.request.sampling_params
        if self.token_ids:
            # What was asked of the prompt came with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request,
            sampling_params=params,
            resumed_token_ids=self.token_ids,
            suspect=self.is_suspect,
        )

    def note_crash(self) -> None:
        """The core died in a step that computed it."""
        self._crashes = self._crashes.again(len(self.token_ids))

    def note_loss(self) -> None:
        """The core that had it is gone, and not in a step that is known to have computed it."""
        self._losses = self._losses.again(len(self.token_ids))


class Journal:
    """The live requests by id, as they came here. One is live until its output with `finished` set is recorded."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._num_steps = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def ids(self) -> Set[int]:
        """Of the live requests."""
        return self._entries.keys()

    @property
    def has_work(self) -> bool:
        """Whether the core owes anything: tokens, or the last output of a request that was called back."""
        return any(entry.place is not Place.HERE for entry in self)

    def entries(self, request_ids: Iterable[int]) -> list[Entry]:
        """Of these requests, those that are live."""
        return [entry for id in request_ids if (entry := self._entries.get(id)) is not None]

    def add(self, requests: Sequence[AddRequest]) -> list[Entry]:
        """Take requests in. Raises `ValueError` for an id that is used twice."""
        self.check_new(requests)
        entries = {request.request_id: Entry(request) for request in requests}
        self._entries |= entries
        return list(entries.values())

    def check_new(self, requests: Sequence[AddRequest]) -> None:
        """Raise `ValueError` where the id of one is that of another, or of a live request."""
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or not self._entries.keys().isdisjoint(ids):
            raise ValueError("a request id is used twice; each live request needs an id of its own")

    def give_away(self, entries: Iterable[Entry]) -> None:
        """Forget live requests, which go on in another journal."""
        for entry in entries:
            del self._entries[entry.request.request_id]

    def take_over(self, entries: Iterable[Entry]) -> None:
        """Take in live requests of another journal, with all that is known of them."""
        self._entries |= {entry.request.request_id: entry for entry in entries}

    def send(self, entries: Iterable[Entry]) -> list[AddRequest]:
        """The messages that bring those of `entries` to the core that may go there."""
        messages = []
        now = time.monotonic()
        for entry in entries:
            if entry.place is Place.HERE and not entry.paused:
                entry.place = Place.CORE
                entry.tokens_at_start = len(entry.token_ids)
                entry.steps_at_start = self._num_steps
                message = entry.message()
                entry.sent_time = message.sent_time = now
                messages.append(message)
        return messages

    def call_back(self, entries: Iterable[Entry]) -> list[int]:
        """Pause requests; the ids of those that the core must be told to end."""
        leaving = []
        for entry in entries:
            entry.paused = True
            if entry.place is Place.CORE and not entry.aborted:
                entry.place = Place.LEAVING
                leaving.append(entry.request.request_id)
        return leaving

    def let_go_on(self, entries: Iterable[Entry]) -> list[Entry]:
        """Have paused requests go on; those that can be sent at once."""
        going = list(entries)
        for entry in going:
            entry.paused = False
        return [entry for entry in going if entry.place is Place.HERE]

    def abort(self, entries: Iterable[Entry]) -> tuple[list[int], list[RequestOutput]]:
        """Have requests end: ids of those that the core must be told to end, and last outputs of the others."""
        there, here = [], []
        for entry in entries:
            request_id, entry.aborted = entry.request.request_id, True
            if entry.place is Place.CORE:
                there.append(request_id)
            elif entry.place is Place.HERE:
                here.append(terminal_output(request_id, "abort"))
        return there, here

    def record(self, step: StepOutputs) -> list[Entry]:
        """Write down what a step brought; the requests that have left the core with it, to be paused.

        Their last outputs are taken out of `step`. Costs a dictionary's look-up and a list's growth a request.
        """
        self._num_steps += 1
        entries = self._entries
        left: list[Entry] = []
        for output in step.outputs:
            entry = entries.get(output.request_id)
            if entry is None:
                continue
            if output.time is not None:
                output.time += entry.sent_time
            if not output.finished:
                entry.token_ids += output.output_tokens
            elif entry.place is Place.LEAVING and output.finish_reason == "abort" and not entry.aborted:
                entry.place = Place.HERE
                left.append(entry)
            else:
                del entries[output.request_id]
        if left:
            ids = {entry.request.request_id for entry in left}
            step.outputs = [output for output in step.outputs if output.request_id not in ids]
        return left

    def core_died(self, in_step: Collection[int] | None, *, killed: bool) -> list[RequestOutput]:
        """Call every request back from a core that is gone, which died, or was `killed`, in a step of `in_step`.

        None: it followed another into its end, or its host is gone, and no request is suspected. The last outputs of
        those that do not go on: they were aborted, or one core after the other died on them.
        """
        there = [entry for entry in self if entry.place is not Place.HERE]
        # A core that dies between steps may have died of a request that it had not begun with.
        suspects: set[Entry] = set()
        if in_step is not None:
            suspects.update(self.entries(in_step) or [entry for entry in there if self._just_came(entry)])
            suspects &= set(there)
        for entry in suspects:
            entry.note_crash()
        # A core may die of what no step computes, as of a grammar: nobody is to take one after the other along.
        for entry in there:
            if entry not in suspects:
                entry.note_loss()
        ended = []
        for entry in there:
            entry.place = Place.HERE
            if entry.aborted:
                ended.append(terminal_output(entry.request.request_id, "abort"))
            elif entry in suspects and entry.crashes >= (_MOST_KILLS if killed else _MOST_CRASHES):
                error = f"this request is not tried again: the engine died {entry.crashes} times in a row computing it"
                ended.append(terminal_output(entry.request.request_id, "error", error, is_poison=True))
        return ended

    def _just_came(self, entry: Entry) -> bool:
        """Whether the core may have died of taking it in: what waited while steps went on is in nobody's way."""
        is_new = entry.steps_at_start >= self._num_steps - 1 or entry.request.sampling_params.grammar is not None
        return is_new and len(entry.token_ids) == entry.tokens_at_start

    def end_all(self, error: str) -> list[RequestOutput]:
        """The last outputs of all live requests, which end with `error`."""
        return [terminal_output(id, "error", error) for id in self._entries]
