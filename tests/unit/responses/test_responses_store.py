"""Stored responses: their owners, number, lifetime, and the responses that continue them."""

import msgspec
import pytest

from server.errors import BadRequest
from server.limits.accounts import Accounts
from server.limits.owners import ANYONE, Owner
from server.responses.store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    StoredResponse,
    StoreFull,
    Turn,
)
from server.schemas.response_objects import InputText, MessageItem

ME, YOU = Owner.of_key("me"), Owner.of_key("you")


def message(id: str, text: str = "Hi") -> MessageItem:
    return MessageItem(id=id, role="user", content=(InputText(text),))


def turn_of(name: str, previous: Turn | None = None, text: str = "Hi") -> Turn:
    return Turn(previous, [message(f"in_{name}", text)]).answered([message(f"out_{name}", text)])


def response(name: str, turn: Turn | None = None, owner: Owner = ANYONE, *, running: bool = False) -> StoredResponse:
    return StoredResponse(name, owner, turn or turn_of(name), lambda: (name.encode(),), running=running, size=10)


def store_of(*responses: StoredResponse, max_responses: int = 3, max_bytes: int = 2**20) -> ResponseStore:
    store = ResponseStore(max_responses, max_bytes)
    for each in responses:
        store.put(each)
    return store


def test_a_response_is_its_owners_alone() -> None:
    store = store_of(response("a", owner=ME))
    assert store.get("a", ME).body() == (b"a",)
    for owner in (YOU, ANYONE):
        with pytest.raises(ResponseNotFound) as refused:
            store.get("a", owner)
        assert refused.value.status == 404
        with pytest.raises(PreviousResponseNotFound):
            store.previous_turn("a", owner)
        with pytest.raises(ResponseNotFound):
            store.delete("a", owner)
        assert store.item("in_a", owner) is None
    assert store.item("in_a", ME) == message("in_a")


class Uncompared(MessageItem):
    """Comparing a removed item with all others of its id, of which a client may store very many, would take long."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("items are compared")


def test_items_of_one_id_are_removed_without_a_search() -> None:
    def turn(text: str) -> Turn:
        return Turn(None, [Uncompared(id="same", role="user", content=(InputText(text),))])

    store = store_of(*(response(name, turn(name)) for name in "abc"))
    for name, left in (("c", "a"), ("a", "b")):
        store.delete(name, ANYONE)
        item = store.item("same", ANYONE)
        assert isinstance(item, MessageItem)
        assert item.text == left
    store.delete("b", ANYONE)
    assert store.num_items == 0


def test_the_least_recently_used_makes_room() -> None:
    store = store_of(response("a"), response("b"), response("c"))
    store.get("a", ANYONE)
    store.put(response("d"))
    assert len(store) == 3
    with pytest.raises(ResponseNotFound):
        store.get("b", ANYONE)
    assert store.get("a", ANYONE)


def test_bytes_are_bounded_as_well() -> None:
    one = response("a").size + turn_of("a").size
    store = store_of(*(response(name) for name in "abc"), max_bytes=2 * one)
    assert (len(store), store.num_bytes) == (2, 2 * one)


def test_a_response_larger_than_the_store_evicts_no_other() -> None:
    store = store_of(response("a"), max_bytes=5000)
    store.put(response("b", turn_of("b", text="x" * 5000)))
    assert store.get("a", ANYONE)
    with pytest.raises(ResponseNotFound):
        store.get("b", ANYONE)


def test_a_conversation_outlives_the_responses_it_was_made_of() -> None:
    first = turn_of("a")
    second = turn_of("b", first)
    store = store_of(response("a", first), response("b", second))
    store.delete("a", ANYONE)
    assert [item.id for item in store.previous_turn("b", ANYONE).conversation()] == ["in_a", "out_a", "in_b", "out_b"]
    assert [item.id for item in second.context()] == ["in_a", "out_a", "in_b"]
    assert store.item("out_a", ANYONE) == message("out_a")
    store.delete("b", ANYONE)
    assert store.num_bytes == 0
    assert store.item("out_a", ANYONE) is None


def test_a_turn_that_two_go_on_from_is_counted_once() -> None:
    first = turn_of("a")
    store = store_of(response("a", first), response("b", turn_of("b", first)), response("c", turn_of("c", first)))
    assert store.num_bytes == 3 * (10 + first.size)


def test_a_running_response_stays_and_cannot_be_gone_on_from() -> None:
    running = response("a", running=True)
    store = store_of(running, max_responses=1)
    with pytest.raises(BadRequest, match="still running"):
        store.previous_turn("a", ANYONE)
    with pytest.raises(StoreFull, match="max_stored_responses") as refused:
        store.put(response("b", running=True))
    assert refused.value.status == 429
    store.put(response("c"))
    assert store.get("a", ANYONE) is running
    assert len(store) == 1
    store.finish(running, turn_of("a"), (b"done",), 4)
    assert store.get("a", ANYONE).body() == (b"done",)
    store.put(response("d"))
    with pytest.raises(ResponseNotFound):
        store.get("a", ANYONE)


def test_running_responses_may_not_hold_more_bytes_than_the_store() -> None:
    store = store_of(max_bytes=5000)
    with pytest.raises(StoreFull, match="max_stored_response_bytes"):
        store.put(response("a", turn_of("a", text="x" * 5000), running=True))
    assert store.num_bytes == 0


def test_a_running_response_that_was_deleted_stays_forgotten() -> None:
    running = response("a", running=True)
    store = store_of(running)
    store.delete("a", ANYONE)
    store.finish(running, turn_of("a"), (b"done",), 4)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_of_nothing_keeps_nothing() -> None:
    store = store_of(response("a"), max_responses=0)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_turn_weighs_at_least_what_its_items_do() -> None:
    turn = turn_of("a", text="x" * 1000)
    assert turn.size >= len(msgspec.json.encode([*turn.input, *turn.output]))
    assert turn_of("b", turn).total_size() == turn.size + turn_of("b").size


def ids(store: ResponseStore, owner: Owner) -> list[str]:
    return [each.id for each in store if each.owner == owner]


@pytest.mark.parametrize("bound", ["responses", "bytes"])
def test_an_owner_that_stores_much_evicts_its_own_and_not_another_ones(bound: str) -> None:
    one = response("a").size + turn_of("a").size
    bounds = {"max_responses": 8} if bound == "responses" else {"max_responses": 1000, "max_bytes": 8 * one + one // 2}
    store = store_of(response("a", owner=ME), response("b", owner=ME), **bounds)
    for number in range(1040):
        store.put(response(f"{number:04}", owner=YOU))
    assert ids(store, ME) == ["a", "b"]
    assert ids(store, YOU) == [f"{number:04}" for number in range(1034, 1040)]
    for number in range(10):
        store.put(response(f"me{number}", owner=ME))
    assert len(ids(store, ME)) == len(ids(store, YOU)) == 4


def test_what_each_owner_stores_is_in_the_accounts_and_all_of_it_leaves() -> None:
    accounts = Accounts()
    store = ResponseStore(10, 2**20, accounts)
    first = turn_of("a")
    store.put(response("a", first, ME))
    store.put(response("b", turn_of("b", first), ME))
    store.put(response("c", owner=YOU))
    assert accounts.users("stored_responses") == {ME.party: 2, YOU.party: 1}
    assert accounts.used(YOU.party, "stored_bytes") == 10 + first.size
    assert accounts.used(ME.party, "stored_bytes") == 2 * (10 + first.size)
    for each in list(store):
        store.delete(each.id, each.owner)
    assert not accounts.users("stored_responses")
    assert not accounts.users("stored_bytes")


def test_an_owner_runs_no_more_in_the_background_than_its_cap() -> None:
    accounts = Accounts()
    store = ResponseStore(100, 2**20, accounts, max_running_per_owner=2)
    running = [response(name, owner=ME, running=True) for name in "ab"]
    for each in running:
        store.put(each)
    with pytest.raises(StoreFull, match="max_background_responses_per_key"):
        store.put(response("c", owner=ME, running=True))
    store.put(response("d", owner=YOU, running=True))
    store.finish(running[0], turn_of("a"), (b"done",), 4)
    store.put(response("c", owner=ME, running=True))
    assert accounts.users("background_responses") == {ME.party: 2, YOU.party: 1}


def test_events_that_grow_make_their_own_owner_give_way() -> None:
    ended: list[str] = []

    def end(stored: StoredResponse) -> None:
        ended.append(stored.id)
        store.finish(stored, stored.turn, (b"failed",), 6)

    store = ResponseStore(100, 10_000, Accounts(), end)
    store.put(response("old", owner=YOU))
    store.put(response("mine", owner=ME))
    running = [response(name, owner=YOU, running=True) for name in ("one", "two")]
    for each in running:
        store.put(each)
    store.grown(running[0], 5000)
    assert (ended, ids(store, YOU)) == ([], ["one", "two"])
    store.grown(running[1], 4000)
    assert ended == ["one"]
    assert store.num_bytes <= 10_000
    assert ids(store, ME) == ["mine"]
    assert store.get("one", YOU).body() == (b"failed",)
    store.put(response("new", owner=ME, running=True))
    assert running[1].running


def test_an_owner_that_holds_less_begins_a_response_where_another_ones_fill_the_store() -> None:
    store = ResponseStore(100, 10_000, Accounts(), lambda stored: store.finish(stored, stored.turn, (b"failed",), 6))
    heavy = response("heavy", owner=YOU, running=True)
    store.put(heavy)
    store.grown(heavy, 9900 - heavy.turn.size)
    with pytest.raises(StoreFull, match="max_stored_response_bytes"):
        store.put(response("more", owner=YOU, running=True))
    store.put(response("light", owner=ME, running=True))
    assert not heavy.running
    assert store.get("light", ME).running
