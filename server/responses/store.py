"""`ResponseStore`: the responses that clients may retrieve and continue, in memory, within bounds.

A conversation is a chain of `Turn`s. A turn is referenced by its response and by the turns that continue it: its items
are stored once, and as long as anything stored needs them, even if its own response is deleted. `stored_items` makes
items from the input of a request; an `EventLog` holds the events of a background response for clients that follow it.
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

import msgspec

from server.errors import ApiError, BadRequest
from server.schemas.responses import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputFunctionCall,
    InputFunctionCallOutput,
    InputItem,
    InputMessage,
    InputPart,
    InputReasoning,
    InputReference,
    InputText,
    Item,
    MessageContent,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)

_EVENT_END = b"\n\n"
_ITEM_OVERHEAD = 512
"""Memory of an item without its text."""
_WHY_NOT_FOUND = "it never existed, was created with store false, was deleted, or was evicted for newer ones"


class ResponseNotFound(BadRequest):
    """The response is not stored for this client."""

    status = 404


class PreviousResponseNotFound(BadRequest):
    """The response that a request continues is not stored for this client."""

    code = "previous_response_not_found"


class StoreFull(ApiError):
    """The responses that are still running fill the store."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    headers = {"Retry-After": "1"}  # noqa: RUF012


class Turn:
    """The items that one response added to its conversation, and the turns before them."""

    __slots__ = ("input", "num_references", "output", "previous", "size")

    def __init__(self, previous: "Turn | None", input: Sequence[Item]) -> None:
        self.previous = previous
        self.input = tuple(input)
        self.output: tuple[Item, ...] = ()
        self.num_references = 0
        self.size = _size(self.input)
        """Bytes of this turn's own items."""

    def answered(self, output: Sequence[Item]) -> "Turn":
        """This turn with its answer."""
        turn = Turn(self.previous, ())
        turn.input, turn.output, turn.size = self.input, tuple(output), self.size + _size(output)
        return turn

    def conversation(self) -> list[Item]:
        """All items, oldest first, this turn's output included."""
        turns = list(self.chain())
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def context(self) -> list[Item]:
        """All items that this turn's output answers, oldest first."""
        before = [] if self.previous is None else self.previous.conversation()
        return [*before, *self.input]

    def total_size(self) -> int:
        """Bytes of this turn and of all before it."""
        return sum(turn.size for turn in self.chain())

    def chain(self) -> Iterator["Turn"]:
        """This turn, the one before it, and so on."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous


class EventLog:
    """The events of a background response. An event's index is its sequence number."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def append(self, events: bytes) -> None:
        """Add one or several events, and wake the followers."""
        self._events += [event + _EVENT_END for event in events.split(_EVENT_END) if event]
        self.num_bytes += len(events)
        self._wake()

    def close(self) -> None:
        """End the log: no more events follow."""
        self._is_closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number `start` to the last one, as they are added."""
        while True:
            changed = self._changed
            if events := self._events[start:]:
                start += len(events)
                yield b"".join(events)
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class StoredResponse:
    """One response. While `running`, it is not evicted, and its `body` changes."""

    __slots__ = ("body", "events", "id", "is_background", "owner", "running", "size", "turn")

    def __init__(
        self,
        id: str,
        owner: object,
        turn: Turn,
        body: Callable[[], bytes],
        *,
        events: EventLog | None = None,
        is_background: bool = False,
        running: bool = False,
        size: int = 0,
    ) -> None:
        self.id = id
        self.owner = owner
        self.turn = turn
        self.body = body
        """The response as JSON."""
        self.events = events
        """The events of a background response that was created with `stream`."""
        self.is_background = is_background
        self.running = running
        self.size = size
        """Bytes without those of its turns."""


class ResponseStore:
    """Bounded by number and bytes; evicts the least recently used responses."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[object, str], list[Item]] = {}
        """Items by owner and id, once for each turn that has them."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def __iter__(self) -> Iterator[StoredResponse]:
        """The least recently used first."""
        return iter(self._responses.values())

    @property
    def num_items(self) -> int:
        """Items that references may name."""
        return len(self._items)

    def get(self, id: str, owner: object) -> StoredResponse:
        """The response with this id. Raises `ResponseNotFound`, also for one of another owner."""
        stored = self._responses.get(id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(f"Response with id {id[:80]!r} not found: {_WHY_NOT_FOUND}", param="response_id")
        self._responses.move_to_end(id)
        return stored

    def previous_turn(self, id: str, owner: object) -> Turn:
        """The turn of the response to continue. Raises `BadRequest` if it is not stored, or still running."""
        try:
            stored = self.get(id, owner)
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(
                f"Previous response with id {id[:80]!r} not found: {_WHY_NOT_FOUND}", param="previous_response_id"
            ) from error
        if stored.running:
            raise BadRequest(
                f"previous_response_id is {id[:80]!r}, a response that is still running; wait until it has ended",
                param="previous_response_id",
            )
        return stored.turn

    def item(self, id: str, owner: object) -> Item | None:
        """The item of a stored response, input or output."""
        found = self._items.get((owner, id))
        return found[0] if found else None

    def put(self, stored: StoredResponse) -> None:
        """Add `stored` and evict others for it. One that has ended and exceeds the whole store is not added.

        Raises `StoreFull` if it is running and the other running ones leave no room.
        """
        if stored.running:
            self._check_room(stored)
        elif stored.size + stored.turn.total_size() > self._max_bytes:
            return
        self._responses[stored.id] = stored
        self.num_bytes += stored.size
        self._add_reference(stored.turn, stored.owner)
        self._evict()

    def finish(self, stored: StoredResponse, turn: Turn, body: bytes, size: int) -> None:
        """`stored` has ended with `turn` and `body`, and can be evicted from now on; see `put`."""
        stored.running = False
        stored.body = lambda: body
        if self._responses.get(stored.id) is not stored:
            return
        self._add_reference(turn, stored.owner)
        self._remove_reference(stored.turn, stored.owner)
        self.num_bytes += size - stored.size
        stored.turn, stored.size = turn, size
        if size + turn.total_size() > self._max_bytes:
            self._remove(stored)
        self._evict()

    def delete(self, id: str, owner: object) -> StoredResponse:
        """Remove a response. Its items stay for responses that continue it. Raises `ResponseNotFound`."""
        stored = self.get(id, owner)
        self._remove(stored)
        return stored

    def _check_room(self, stored: StoredResponse) -> None:
        running = [each for each in self._responses.values() if each.running]
        if len(running) >= self._max_responses:
            raise StoreFull(
                f"{len(running)} background responses are running, and this server keeps at most "
                f"{self._max_responses} (max_stored_responses); wait for one to end"
            )
        num_bytes = sum(each.size + each.turn.size for each in running) + stored.size + stored.turn.size
        if num_bytes > self._max_bytes:
            raise StoreFull(
                f"the background responses that run hold {num_bytes} bytes with this one, and this server keeps at "
                f"most {self._max_bytes} (max_stored_response_bytes); wait for one to end"
            )

    def _evict(self) -> None:
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            oldest = next((each for each in self._responses.values() if not each.running), None)
            if oldest is None:
                return
            self._remove(oldest)

    def _remove(self, stored: StoredResponse) -> None:
        del self._responses[stored.id]
        self.num_bytes -= stored.size
        self._remove_reference(stored.turn, stored.owner)

    def _add_reference(self, turn: Turn | None, owner: object) -> None:
        while turn is not None:
            turn.num_references += 1
            if turn.num_references > 1:
                return
            self.num_bytes += turn.size
            for item in (*turn.input, *turn.output):
                self._items.setdefault((owner, item.id), []).append(item)
            turn = turn.previous

    def _remove_reference(self, turn: Turn | None, owner: object) -> None:
        while turn is not None:
            turn.num_references -= 1
            if turn.num_references:
                return
            self.num_bytes -= turn.size
            for item in (*turn.input, *turn.output):
                self._remove_item(item, owner)
            turn = turn.previous

    def _remove_item(self, item: Item, owner: object) -> None:
        found = self._items[owner, item.id]
        if len(found) == 1:
            del self._items[owner, item.id]
        else:
            found.remove(item)


def _size(items: Sequence[Item]) -> int:
    return sum(len(msgspec.json.encode(item)) + _ITEM_OVERHEAD for item in items)


def new_id(prefix: str) -> str:
    """A random id that cannot be guessed."""
    return f"{prefix}_{uuid.uuid4().hex}"


def stored_items(given: Iterable[InputItem], stored: Callable[[str], Item | None]) -> list[Item]:
    """The items of a request. `stored` looks up references. Raises `BadRequest` for one that it does not find."""
    items: list[Item] = []
    for index, each in enumerate(given):
        if isinstance(each, InputReference):
            item = stored(each.id)
            if item is None:
                raise BadRequest(
                    f"input[{index}].id is {each.id[:60]!r}, and no stored response has an item of this id; "
                    "send the item itself",
                    param=f"input[{index}].id",
                )
            items.append(item)
        else:
            items.append(_stored_item(each))
    return items


def _stored_item(item: InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning) -> Item:
    if isinstance(item, InputMessage):
        id = item.id or new_id("msg")
        content = [_content(part, is_answer=item.role == "assistant") for part in item.content]
        return MessageItem(id=id, role=item.role, content=content, status=item.status or "completed")
    if isinstance(item, InputFunctionCall):
        return FunctionCallItem(
            id=item.id or new_id("fc"),
            call_id=item.call_id,
            name=item.name,
            arguments=item.arguments,
            status=item.status or "completed",
        )
    if isinstance(item, InputFunctionCallOutput):
        output = "".join(part.text or part.refusal or "" for part in item.output)
        return FunctionCallOutputItem(id=item.id or new_id("fco"), call_id=item.call_id, output=output)
    return ReasoningItem(
        id=item.id or new_id("rs"),
        summary=[SummaryText(each.text) for each in item.summary or ()],
        content=[ReasoningText(each.text) for each in item.content or ()],
    )


def _content(part: InputPart, *, is_answer: bool) -> MessageContent:
    """The part with the type that it has in an answer, or else in an input message."""
    if not is_answer:
        return InputText(part.text or part.refusal or "")
    return Refusal(part.refusal or "") if part.type == "refusal" else OutputText(part.text or "")
