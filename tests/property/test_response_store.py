"""Random operations on the store: its bounds, its owners and its accounting stay correct."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from server.limits.accounts import Accounts
from server.limits.owners import ANYONE, Owner
from server.responses.store import ResponseNotFound, ResponseStore, StoredResponse, StoreFull, Turn
from server.schemas.response_objects import InputText, MessageItem

PARTIES = [Owner.of_key("me"), Owner.of_key("you"), ANYONE, Owner.of_address("10.0.0.1")]
OWNERS = st.sampled_from(PARTIES)
TEXTS = st.sampled_from(["", "x" * 500, "x" * 3000])
ITEM_IDS = st.sampled_from(["one", "two"]) | st.none()


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._stored: dict[str, StoredResponse] = {}
        """All responses that were ever stored."""
        self._deleted: set[str] = set()
        self._ended: set[str] = set()
        """Responses that the store ended."""

    @initialize(max_responses=st.integers(0, 4), max_bytes=st.sampled_from([0, 4000, 20000]))
    def begin(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.accounts = Accounts()
        self.store = ResponseStore(max_responses, max_bytes, self.accounts, self._end, max_running_per_owner=3)

    def _end(self, stored: StoredResponse) -> None:
        self.store.finish(stored, stored.turn, (b"failed",), 10)
        self._ended.add(stored.id)

    @rule(owner=OWNERS, text=TEXTS, item_id=ITEM_IDS, running=st.booleans(), data=st.data())
    def put(self, owner: Owner, text: str, item_id: str | None, running: bool, data: st.DataObject) -> None:
        own = [each for each in self._stored.values() if each.owner.key == owner.key and not each.running]
        before = data.draw(st.none() | st.sampled_from(own)) if own else None
        turn = Turn(None if before is None else before.turn, [self._item(text, item_id)])
        self._count += 1
        id = str(self._count)
        if not running:
            turn = turn.answered([self._item(text, None)])
        stored = StoredResponse(id, owner, turn, bytes, running=running, size=len(text))
        try:
            self.store.put(stored)
        except StoreFull:
            assert running
        else:
            self._stored[id] = stored

    @rule(text=TEXTS, data=st.data())
    def finish(self, text: str, data: st.DataObject) -> None:
        if running := [each for each in self._stored.values() if each.running]:
            stored = data.draw(st.sampled_from(running))
            self.store.finish(stored, stored.turn.answered([self._item(text, None)]), (), len(text))

    @rule(size=st.sampled_from([500, 3000, 30000]), data=st.data())
    def grow(self, size: int, data: st.DataObject) -> None:
        if running := [each for each in self._stored.values() if each.running]:
            stored = data.draw(st.sampled_from(running))
            self.store.grown(stored, stored.size + size)

    @rule(data=st.data(), owner=OWNERS, forget=st.booleans())
    def use(self, data: st.DataObject, owner: Owner, forget: bool) -> None:
        if self._stored:
            stored = data.draw(st.sampled_from(list(self._stored.values())))
            found = self._find(stored, owner)
            assert not (found and stored.owner.key != owner.key)
            assert not (found and stored.id in self._deleted)
            if found and forget:
                self.store.delete(stored.id, owner)
                self._deleted.add(stored.id)

    @invariant()
    def running_ones_stay(self) -> None:
        for stored in self._stored.values():
            if stored.running and stored.id not in self._deleted:
                assert self._find(stored, stored.owner)

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "store"):
            return
        kept = list(self.store)
        if any(not each.running for each in kept):
            assert len(kept) <= self.max_responses
            assert self.store.num_bytes <= self.max_bytes
        assert sum(each.running for each in kept) <= self.max_responses

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "store"):
            return
        kept = list(self.store)
        turns = {id(turn): (turn, each.owner) for each in kept for turn in each.turn.chain()}
        reached = sum(turn.size for turn, _ in turns.values()) + sum(each.size for each in kept)
        assert self.store.num_bytes == reached
        assert sum(self.accounts.users("stored_bytes").values()) == reached
        for owner in PARTIES:
            own = [each for each in kept if each.owner == owner]
            assert self.accounts.used(owner.party, "stored_responses") == len(own)
            running = [each for each in self._stored.values() if each.owner == owner and each.running]
            assert self.accounts.used(owner.party, "background_responses") == len(running) <= 3
        found = {(owner.key, item.id) for turn, owner in turns.values() for item in (*turn.input, *turn.output)}
        for owner in PARTIES:
            for name in ("one", "two"):
                assert (self.store.item(name, owner) is not None) == ((owner.key, name) in found)
        assert self.store.num_items == len(found)

    def _find(self, stored: StoredResponse, owner: Owner) -> bool:
        """Whether it is still stored; looking it up counts as use."""
        try:
            return self.store.get(stored.id, owner) is stored
        except ResponseNotFound:
            return False

    def _item(self, text: str, id: str | None) -> MessageItem:
        self._count += 1
        return MessageItem(id=id or f"item{self._count}", role="user", content=(InputText(text),))


TestStore = StoreMachine.TestCase
