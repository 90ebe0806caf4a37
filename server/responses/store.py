"""`ResponseStore`: stores, in bounded memory, the responses that clients may retrieve and continue.

When a bound is exceeded, responses of the owner with the largest use are removed: first the least recently used ended
ones, then a running one, which is ended. A conversation is a chain of `Turn`s. A turn is referenced by its response
and by the turns that continue it. So its items are stored once, as long as anything needs them, even if its own
response is deleted. `stored_items` converts the input of a request to items. An `EventLog` holds the events of a
background response for the clients that read them.
"""

import asyncio
import json
import re
import uuid
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from server.errors import ApiError, BadRequest
from server.ignored import ignore
from server.limits.accounts import Accounts, Resource
from server.limits.owners import Owner
from server.responses.tools import flat_name
from server.schemas.response_objects import (
    CompactionItem,
    CustomCallItem,
    CustomCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
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
from server.schemas.responses import (
    InputCompaction,
    InputCompactionTrigger,
    InputCustomCall,
    InputCustomCallOutput,
    InputFunctionCall,
    InputFunctionCallOutput,
    InputHostedItem,
    InputItem,
    InputMessage,
    InputPart,
    InputReasoning,
    InputReference,
    InputTools,
    OutputPart,
    UnreadPart,
)

_EVENT_END = b"\n\n"
_ITEM_OVERHEAD = 512
"""Bytes of an item without its text."""

_FOLLOWED_BYTES = 64 * 2**10
"""Approximate bytes that a reader of a log gets at a time, so that a slow reader does not copy the whole log."""
_WHY_NOT_FOUND = "it never existed, was created with store false, was deleted, or was evicted for newer ones"


class ResponseNotFound(BadRequest):
    """The response is not stored for this client."""

    status = 404


class PreviousResponseNotFound(BadRequest):
    """The response that a request continues is not stored for this client."""

    code = "previous_response_not_found"


class StoreFull(ApiError):
    """Running responses fill the store, or their owner's share of it."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    headers = {"Retry-After": "1"}  # noqa: RUF012


class Turn:
    """The items that one response added to its conversation, and the turns before them."""

    __slots__ = ("input", "num_references", "output", "party", "previous", "size")

    def __init__(self, previous: "Turn | None", input: Sequence[Item]) -> None:
        self.previous = previous
        self.input = tuple(input)
        self.output: tuple[Item, ...] = ()
        self.num_references = 0
        self.party = ""
        """Party that the turn is accounted to: the owner of the first stored response that refers to it."""
        self.size = _size(self.input)
        """Bytes of this turn's own items."""

    def answered(self, output: Sequence[Item]) -> "Turn":
        """Return this turn with the answer `output`."""
        turn = Turn(self.previous, ())
        turn.input, turn.output, turn.size = self.input, tuple(output), self.size + _size(output)
        return turn

    def conversation(self) -> list[Item]:
        """Return all items, oldest first, including this turn's output."""
        turns = list(self.chain())
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def context(self) -> list[Item]:
        """Return all items that this turn's output answers, oldest first."""
        before = [] if self.previous is None else self.previous.conversation()
        return [*before, *self.input]

    def total_size(self) -> int:
        """Return the bytes of this turn and of all earlier turns."""
        return sum(turn.size for turn in self.chain())

    def chain(self) -> Iterator["Turn"]:
        """Yield this turn, the previous one, and so on."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous


class EventLog:
    """The events of a background response. An event's index is its sequence number.

    They are stored in one byte array: with lists, the garbage collector would visit every event of every log.
    """

    def __init__(self) -> None:
        self._events = bytearray()
        self._ends = array("Q")
        """End offset of each stored event."""
        self._first = 0
        """Sequence number of the first stored event."""
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored events."""
        return len(self._events) + self._ends.itemsize * len(self._ends)

    def append(self, events: bytes) -> None:
        """Append one or several events, each ending with an empty line, and wake the readers."""
        before = len(self._events)
        index = events.find(_EVENT_END)
        while index >= 0:
            index += len(_EVENT_END)
            self._ends.append(before + index)
            index = events.find(_EVENT_END, index)
        self._events += events
        self._wake()

    def drop(self) -> None:
        """Drop the events so far. Readers continue with the next event."""
        self._first += len(self._ends)
        self._events.clear()
        del self._ends[:]

    def close(self) -> None:
        """Mark the log as complete."""
        self._is_closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `start` to the last one, as they are added."""
        while True:
            changed = self._changed
            start = max(start, self._first)
            if start < self._first + len(self._ends):
                start, events = self._some_from(start)
                yield events
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _some_from(self, start: int) -> tuple[int, bytes]:
        """Return events from number `start`, at least one and about `_FOLLOWED_BYTES`, and the number of the next
        event."""
        index = start - self._first
        begin = self._ends[index - 1] if index else 0
        after = max(bisect_right(self._ends, begin + _FOLLOWED_BYTES, lo=index), index + 1)
        return self._first + after, bytes(memoryview(self._events)[begin : self._ends[after - 1]])

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class StoredResponse:
    """One stored response. While `running`, it is not evicted, and its `body` changes."""

    __slots__ = ("body", "events", "id", "is_background", "owner", "running", "size", "turn")

    def __init__(
        self,
        id: str,
        owner: Owner,
        turn: Turn,
        body: Callable[[], Sequence[bytes]],
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
        """Returns the response as JSON, in parts."""
        self.events = events
        """Events of a background response that was created with `stream`, else None."""
        self.is_background = is_background
        self.running = running
        self.size = size
        """Bytes of the response without its turns."""


class ResponseStore:
    """Stores responses, bounded by their number and bytes. `accounts` counts both by owner.

    Only the owner of the key that created a response finds it. Without keys, all clients do.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        accounts: Accounts | None = None,
        end_running: Callable[[StoredResponse], object] = lambda stored: None,
        max_running_per_owner: int | None = None,
    ) -> None:
        """`end_running` ends a running response, by a call of `finish`, to make room.

        `max_running_per_owner` defaults to a quarter of `max_responses`.
        """
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._accounts = Accounts() if accounts is None else accounts
        self._end_running = end_running
        self._max_running_per_owner = max_running_per_owner or max(1, max_responses // 4)
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[str | None, str], dict[int, tuple[Item, int]]] = {}
        """By owner's key and item id: the items with that id, by Python's `id()`, each with the number of turns that
        have it. Clients choose the ids, and may use one for very many items."""

    @property
    def num_bytes(self) -> int:
        """Number of stored bytes."""
        return self._accounts.total("stored_bytes")

    def __len__(self) -> int:
        return len(self._responses)

    def __iter__(self) -> Iterator[StoredResponse]:
        """Iterate over the responses, least recently used first."""
        return iter(self._responses.values())

    @property
    def num_items(self) -> int:
        """Number of items that requests can refer to."""
        return len(self._items)

    def get(self, id: str, owner: Owner) -> StoredResponse:
        """Return the response with this id. Raises `ResponseNotFound`, also for a response of another key."""
        stored = self._responses.get(id)
        if stored is None or stored.owner.key != owner.key:
            raise ResponseNotFound(f"Response with id {id[:80]!r} not found: {_WHY_NOT_FOUND}", param="response_id")
        self._responses.move_to_end(id)
        return stored

    def previous_turn(self, id: str, owner: Owner) -> Turn:
        """Return the turn of the response to continue. Raises `BadRequest` if it is not stored, or is running."""
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

    def item(self, id: str, owner: Owner) -> Item | None:
        """Return an input or output item of a stored response; None if there is none with this id."""
        found = self._items.get((owner.key, id))
        return next(iter(found.values()))[0] if found else None

    def put(self, stored: StoredResponse) -> None:
        """Add `stored` and evict others for it. An ended response that is larger than the whole store is not added.

        Raises `StoreFull` if it is running and its owner has no room for it.
        """
        if stored.running:
            self._check_room(stored)
            self._accounts.change(stored.owner.party, "background_responses", 1)
        elif stored.size + stored.turn.total_size() > self._max_bytes:
            return
        self._responses[stored.id] = stored
        self._accounts.change(stored.owner.party, "stored_responses", 1)
        self._accounts.change(stored.owner.party, "stored_bytes", stored.size)
        self._add_reference(stored.turn, stored.owner)
        self._make_room()

    def grown(self, stored: StoredResponse, size: int) -> None:
        """Set the size of a running response to `size` bytes, and evict others for it, or end it."""
        if self._responses.get(stored.id) is stored and stored.running:
            self._resize(stored, size)
            self._make_room()

    def finish(self, stored: StoredResponse, turn: Turn, body: Sequence[bytes], size: int) -> None:
        """Note that `stored` has ended with `turn` and `body`, so that it can be evicted; see `put`."""
        if stored.running:
            stored.running = False
            self._accounts.change(stored.owner.party, "background_responses", -1)
        stored.body = lambda: body
        if self._responses.get(stored.id) is not stored:
            return
        self._add_reference(turn, stored.owner)
        self._remove_reference(stored.turn, stored.owner)
        stored.turn = turn
        self._resize(stored, size)
        if size + turn.total_size() > self._max_bytes:
            self._remove(stored)
        self._make_room()

    def delete(self, id: str, owner: Owner) -> StoredResponse:
        """Remove a response. Its items stay for the responses that continue it. Raises `ResponseNotFound`."""
        stored = self.get(id, owner)
        self._remove(stored)
        return stored

    def _check_room(self, stored: StoredResponse) -> None:
        accounts, party = self._accounts, stored.owner.party
        own, running = accounts.used(party, "background_responses"), accounts.total("background_responses")
        if running >= self._max_responses:
            raise StoreFull(
                f"{running} background responses are running, and this server keeps at most "
                f"{self._max_responses} (max_stored_responses); wait for one to end"
            )
        if own >= self._max_running_per_owner:
            raise StoreFull(
                f"{own} background responses of this key or address are running, and this server runs at most "
                f"{self._max_running_per_owner} (max_background_responses_per_key); wait for one to end"
            )
        num_bytes: dict[str, int] = {party: stored.size + stored.turn.size}
        for each in self._responses.values():
            if each.running:
                num_bytes[each.owner.party] = num_bytes.get(each.owner.party, 0) + each.size + each.turn.size
        # If another owner holds more, that owner's responses are evicted instead.
        if sum(num_bytes.values()) > self._max_bytes and num_bytes[party] >= max(num_bytes.values()):
            raise StoreFull(
                f"the background responses of this key or address that run hold {num_bytes[party]} bytes with this "
                f"one, and this server keeps at most {self._max_bytes} for all (max_stored_response_bytes); wait for "
                "one to end"
            )

    def _make_room(self) -> None:
        while (resource := self._exceeded()) and self._make_some_room(resource):
            pass

    def _make_some_room(self, resource: Resource) -> bool:
        """Remove or end one response of the owner that uses most of `resource`. Returns whether there was any."""
        users = self._accounts.users(resource)
        for party in sorted(users, key=users.__getitem__, reverse=True):
            own = [each for each in self._responses.values() if each.owner.party == party]
            oldest = next((each for each in own if not each.running), None)
            if oldest is not None:
                self._remove(oldest)
                return True
            if own and resource == "stored_bytes":  # The number of running responses is bounded by `put`.
                largest = max(own, key=lambda each: each.size)
                self._end_running(largest)
                return not largest.running
        return False

    def _exceeded(self) -> Resource | None:
        """Return the resource that exceeds its bound; None if none does."""
        if self._accounts.total("stored_bytes") > self._max_bytes:
            return "stored_bytes"
        return "stored_responses" if len(self._responses) > self._max_responses else None

    def _resize(self, stored: StoredResponse, size: int) -> None:
        self._accounts.change(stored.owner.party, "stored_bytes", size - stored.size)
        stored.size = size

    def _remove(self, stored: StoredResponse) -> None:
        del self._responses[stored.id]
        self._accounts.change(stored.owner.party, "stored_responses", -1)
        self._accounts.change(stored.owner.party, "stored_bytes", -stored.size)
        self._remove_reference(stored.turn, stored.owner)

    def _add_reference(self, turn: Turn | None, owner: Owner) -> None:
        while turn is not None:
            turn.num_references += 1
            if turn.num_references > 1:
                return
            turn.party = owner.party
            self._accounts.change(turn.party, "stored_bytes", turn.size)
            for item in (*turn.input, *turn.output):
                found = self._items.setdefault((owner.key, item.id), {})
                _, count = found.get(id(item), (item, 0))
                found[id(item)] = item, count + 1
            turn = turn.previous

    def _remove_reference(self, turn: Turn | None, owner: Owner) -> None:
        while turn is not None:
            turn.num_references -= 1
            if turn.num_references:
                return
            self._accounts.change(turn.party, "stored_bytes", -turn.size)
            for item in (*turn.input, *turn.output):
                self._remove_item(item, owner)
            turn = turn.previous

    def _remove_item(self, item: Item, owner: Owner) -> None:
        found = self._items[owner.key, item.id]
        _, count = found[id(item)]
        if count > 1:
            found[id(item)] = item, count - 1
            return
        del found[id(item)]
        if not found:
            del self._items[owner.key, item.id]


def _size(items: Sequence[Item]) -> int:
    return sum(_encoded_size(item) + _ITEM_OVERHEAD for item in items)


def _encoded_size(item: Item) -> int:
    """Return the bytes of an item as JSON. Its log probabilities, which may have megabytes, are not copied."""
    if not isinstance(item, MessageItem):
        return len(msgspec.json.encode(item))
    num_apart, content = 0, []
    for part in item.content:
        if isinstance(part, OutputText) and isinstance(part.logprobs, msgspec.Raw):
            num_apart += len(memoryview(part.logprobs)) - len(b"[]")
            part = msgspec.structs.replace(part, logprobs=())
        content.append(part)
    return num_apart + len(msgspec.json.encode(msgspec.structs.replace(item, content=tuple(content))))


def new_id(prefix: str) -> str:
    """Create a random id that cannot be guessed."""
    return f"{prefix}_{uuid.uuid4().hex}"


def stored_items(
    given: Iterable[InputItem], stored: Callable[[str], Item | None], max_referenced_bytes: int = 2**22
) -> list[Item]:
    """Convert the input of a request to items. `stored` looks up references.

    Raises `BadRequest` for an unknown reference, and for references to more than `max_referenced_bytes` in all: many
    small references could repeat a large item.

    Items that the model cannot read are dropped; those with content are reported as ignored.
    """
    items: list[Item] = []
    num_referenced = 0
    for index, each in enumerate(given):
        if isinstance(each, InputReference):
            item = stored(each.id)
            if item is None:
                raise BadRequest(
                    f"input[{index}].id is {each.id[:60]!r}, and no stored response has an item of this id; "
                    "send the item itself",
                    param=f"input[{index}].id",
                )
            num_referenced += _size((item,))
            if num_referenced > max_referenced_bytes:
                raise BadRequest(
                    f"input[0] to input[{index}] refer to items of {num_referenced} bytes; a request may have at most "
                    f"{max_referenced_bytes} (max_request_bytes); refer to fewer items",
                    param="input",
                )
            items.append(item)
        elif isinstance(each, InputHostedItem):
            read = _hosted_items(each)
            if not read:
                ignore(f"input[{index}] ({each.type})")
            items += read
        elif isinstance(each, InputFunctionCallOutput | InputCustomCallOutput):
            items.append(_call_output(each, index))
        elif not isinstance(each, InputCompactionTrigger | InputTools):
            items.append(_stored_item(each))
    return items


def _stored_item(
    item: InputMessage | InputFunctionCall | InputCustomCall | InputReasoning | InputCompaction,
) -> Item:
    if isinstance(item, InputMessage):
        id = item.id or new_id("msg")
        content = tuple(_content(part, is_answer=item.role == "assistant") for part in item.content)
        return MessageItem(id=id, role=item.role, content=content, status=item.status or "completed")
    if isinstance(item, InputFunctionCall):
        return FunctionCallItem(
            id=item.id or new_id("fc"),
            call_id=item.call_id,
            name=item.name,
            arguments=item.arguments,
            namespace=item.namespace or msgspec.UNSET,
            status=item.status or "completed",
        )
    if isinstance(item, InputCustomCall):
        return CustomCallItem(
            id=item.id or new_id("ctc"),
            call_id=item.call_id,
            name=item.name,
            input=item.input,
            namespace=item.namespace or msgspec.UNSET,
            status=item.status or "completed",
        )
    if isinstance(item, InputCompaction):
        return CompactionItem(id=item.id or new_id("cmp"), encrypted_content=item.encrypted_content)
    return ReasoningItem(
        id=item.id or new_id("rs"),
        summary=tuple(SummaryText(each.text) for each in item.summary or ()),
        content=tuple(ReasoningText(each.text) for each in item.content or ()),
        encrypted_content=item.encrypted_content,
    )


def _call_output(item: InputFunctionCallOutput | InputCustomCallOutput, index: int) -> Item:
    for number, part in enumerate(item.output):
        if isinstance(part, UnreadPart):
            ignore(f"input[{index}].output[{number}] ({part.type})")
    output = "".join(map(_output_text, item.output))
    if item.call_id is None:
        text = f"The tool {flat_name(item.namespace, item.name or '')} reports:\n{output}"
        return MessageItem(id=item.id or new_id("msg"), role="user", content=(InputText(text),))
    if isinstance(item, InputFunctionCallOutput):
        return FunctionCallOutputItem(id=item.id or new_id("fco"), call_id=item.call_id, output=output)
    return CustomCallOutputItem(id=item.id or new_id("ctco"), call_id=item.call_id, output=output)


def _output_text(part: OutputPart) -> str:
    return part.note if isinstance(part, UnreadPart) else part.text or part.refusal or ""


def _content(part: InputPart, *, is_answer: bool) -> MessageContent:
    """Convert a part to its type in an answer, or else in an input message."""
    if not is_answer:
        return InputText(part.text or part.refusal or "")
    return Refusal(part.refusal or "") if part.type == "refusal" else OutputText(part.text or "")


# -- items of tools that another server ran -------------------------------------------------------------------------

_ARGUMENTS = {
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
    "mcp_call": "arguments",
    "code_interpreter_call": "code",
}
"""Calls that the prompt shows as function calls, with the field that becomes the arguments."""

_OUTPUTS = {"mcp_call": "output", "code_interpreter_call": "outputs"}
"""Calls that also contain their output, with its field."""


def _hosted_items(item: InputHostedItem) -> list[Item]:
    """Convert an item to a function call and its output; empty for an item that the model cannot read."""
    fields = item.model_extra or {}
    given = fields.get("call_id")
    call_id = given if isinstance(given, str) else item.id or new_id("call")
    if item.type.endswith("_call_output"):
        return [_hosted_output(call_id, fields.get("output"))]
    if item.type == "agent_message":
        text = _agent_text(fields.get("content"))
        return [MessageItem(id=item.id or new_id("msg"), role="user", content=(InputText(text),))] if text else []
    if item.type not in _ARGUMENTS:
        return []
    name = fields.get("name")
    arguments = fields.get(_ARGUMENTS[item.type])
    call = FunctionCallItem(
        id=new_id("fc"),
        call_id=call_id,
        name=name if isinstance(name, str) else item.type.removesuffix("_call"),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {}),
    )
    if item.type not in _OUTPUTS:
        return [call]
    return [call, _hosted_output(call_id, fields.get(_OUTPUTS[item.type]) or fields.get("error"))]


def _hosted_output(call_id: str, output: Any) -> FunctionCallOutputItem:
    text = output if isinstance(output, str) else _plain_text(output) or json.dumps(output, ensure_ascii=False)
    return FunctionCallOutputItem(id=new_id("fco"), call_id=call_id, output=text)


_CIPHERTEXT = re.compile(r"gAAAA[\w-]{40,}={0,2}", re.ASCII)
"""Matches a text that OpenAI's servers encrypted."""


def _agent_text(parts: Any) -> str:
    """Return the text of a message from one agent to another.

    Codex makes parts of type `encrypted_content` from arguments that it declares to be encrypted. This server encrypts
    no arguments, so they are as the model wrote them. Those that OpenAI's servers encrypted are ignored.
    """
    texts: list[Any] = []
    for part in parts if isinstance(parts, list) else ():
        sealed = part.get("encrypted_content") if isinstance(part, dict) else None
        if not isinstance(sealed, str):
            texts.append(part)
        elif _CIPHERTEXT.fullmatch(sealed):
            ignore("agent_message (encrypted_content of another server)")
        else:
            texts.append({"text": sealed})
    return _plain_text(texts)


def _plain_text(parts: Any) -> str:
    """Return the text of a list of parts; empty for anything else."""
    if not isinstance(parts, list):
        return ""
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
