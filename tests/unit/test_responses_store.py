"""Where responses are kept: by whom, how many, how long, and what goes on from them."""

import msgspec
import pytest

from server.errors import BadRequest
from server.responses.store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    StoredResponse,
    StoreFull,
    Turn,
)
from server.schemas.responses import InputText, MessageItem


def message(id: str, text: str = "Hi") -> MessageItem:
    return MessageItem(id=id, role="user", content=[InputText(text)])


def turn_of(name: str, previous: Turn | None = None, text: str = "Hi") -> Turn:
    return Turn(previous, [message(f"in_{name}", text)]).answered([message(f"out_{name}", text)])


def response(name: str, turn: Turn | None = None, owner: object = None, *, running: bool = False) -> StoredResponse:
    return StoredResponse(name, owner, turn or turn_of(name), name.encode, running=running, size=10)


def store_of(*responses: StoredResponse, max_responses: int = 3, max_bytes: int = 2**20) -> ResponseStore:
    store = ResponseStore(max_responses, max_bytes)
    for each in responses:
        store.put(each)
    return store


def test_a_response_is_its_owners_alone() -> None:
    store = store_of(response("a", owner="me"))
    assert store.get("a", "me").body() == b"a"
    for owner in ("you", None):
        with pytest.raises(ResponseNotFound) as refused:
            store.get("a", owner)
        assert refused.value.status == 404
        with pytest.raises(PreviousResponseNotFound):
            store.previous_turn("a", owner)
        with pytest.raises(ResponseNotFound):
            store.delete("a", owner)
        assert store.item("in_a", owner) is None
    assert store.item("in_a", "me") == message("in_a")


def test_the_least_recently_used_makes_room() -> None:
    store = store_of(response("a"), response("b"), response("c"))
    store.get("a", None)
    store.put(response("d"))
    assert len(store) == 3
    with pytest.raises(ResponseNotFound):
        store.get("b", None)
    assert store.get("a", None)


def test_bytes_are_bounded_as_well() -> None:
    one = response("a").size + turn_of("a").size
    store = store_of(*(response(name) for name in "abc"), max_bytes=2 * one)
    assert (len(store), store.num_bytes) == (2, 2 * one)


def test_a_response_larger_than_the_store_costs_nobody_its_place() -> None:
    store = store_of(response("a"), max_bytes=5000)
    store.put(response("b", turn_of("b", text="x" * 5000)))
    assert store.get("a", None)
    with pytest.raises(ResponseNotFound):
        store.get("b", None)


def test_a_conversation_outlives_the_responses_it_was_made_of() -> None:
    first = turn_of("a")
    second = turn_of("b", first)
    store = store_of(response("a", first), response("b", second))
    store.delete("a", None)
    assert [item.id for item in store.previous_turn("b", None).conversation()] == ["in_a", "out_a", "in_b", "out_b"]
    assert [item.id for item in second.context()] == ["in_a", "out_a", "in_b"]
    assert store.item("out_a", None) == message("out_a")
    store.delete("b", None)
    assert store.num_bytes == 0
    assert store.item("out_a", None) is None


def test_a_turn_that_two_go_on_from_is_counted_once() -> None:
    first = turn_of("a")
    store = store_of(response("a", first), response("b", turn_of("b", first)), response("c", turn_of("c", first)))
    assert store.num_bytes == 3 * (10 + first.size)


def test_a_running_response_stays_and_cannot_be_gone_on_from() -> None:
    running = response("a", running=True)
    store = store_of(running, max_responses=1)
    with pytest.raises(BadRequest, match="still running"):
        store.previous_turn("a", None)
    with pytest.raises(StoreFull, match="max_stored_responses") as refused:
        store.put(response("b", running=True))
    assert refused.value.status == 429
    store.put(response("c"))
    assert store.get("a", None) is running
    assert len(store) == 1
    store.finish(running, turn_of("a"), b"done", 4)
    assert store.get("a", None).body() == b"done"
    store.put(response("d"))
    with pytest.raises(ResponseNotFound):
        store.get("a", None)


def test_running_responses_may_not_hold_more_bytes_than_the_store() -> None:
    store = store_of(max_bytes=5000)
    with pytest.raises(StoreFull, match="max_stored_response_bytes"):
        store.put(response("a", turn_of("a", text="x" * 5000), running=True))
    assert store.num_bytes == 0


def test_a_running_response_that_was_deleted_stays_forgotten() -> None:
    running = response("a", running=True)
    store = store_of(running)
    store.delete("a", None)
    store.finish(running, turn_of("a"), b"done", 4)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_of_nothing_keeps_nothing() -> None:
    store = store_of(response("a"), max_responses=0)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_turn_weighs_at_least_what_its_items_do() -> None:
    turn = turn_of("a", text="x" * 1000)
    assert turn.size >= len(msgspec.json.encode([*turn.input, *turn.output]))
    assert turn_of("b", turn).total_size() == turn.size + turn_of("b").size
