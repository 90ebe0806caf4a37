"""Current and past use by owners: sums that agree, a bounded number of labels, and counters that never fall."""

import pytest

from server.limits.accounts import Accounts
from server.limits.key_file import NUM_LISTED, KeyFile
from server.limits.owners import Owner


def test_use_is_counted_by_owner_and_in_all_and_nothing_of_it_stays() -> None:
    accounts = Accounts()
    accounts.change("a", "connections", 3)
    accounts.change("b", "connections", 1)
    accounts.change("a", "body_bytes", 500)
    assert accounts.users("connections") == {"a": 3, "b": 1}
    assert (accounts.total("connections"), accounts.largest_user("connections")) == (4, "a")
    assert accounts.of_owner("a")["body_bytes"] == 500
    accounts.change("a", "connections", -3)
    accounts.change("b", "connections", -1)
    assert accounts.users("connections") == {}
    assert accounts.total("connections") == 0


def test_metrics_name_the_first_keys_of_the_file_and_count_the_others_together() -> None:
    file, accounts = KeyFile(1, []), Accounts()
    for number in range(NUM_LISTED + 10):
        file.create(f"key{number}")
    for accepted in file.accepted().values():
        accounts.tally(accepted.owner).requests += 1
    for number in range(5):
        accounts.tally(Owner.of_address(f"10.0.0.{number}")).requests += 1
    accounts.tally(Owner.of_key("f" * 64)).requests += 1
    used = {label: counts["requests"] for label, counts, _ in accounts.by_label()}
    assert used == {**{f"key{number}": 1 for number in range(NUM_LISTED)}, "other": 11, "keyless": 5}


def test_owners_that_come_and_go_neither_fill_the_memory_nor_lower_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.limits.accounts._MAX_TALLIES", 20)
    accounts = Accounts()
    busy = Owner.of_address("192.0.2.1")
    accounts.change(busy.party, "requests", 1)
    kept = accounts.tally(busy)
    for number in range(500):
        accounts.tally(Owner.of_address(f"10.0.{number // 250}.{number % 250}")).output_tokens += 2
        [(label, used, in_use)] = accounts.by_label()
        assert (label, used["output_tokens"], in_use["requests"]) == ("keyless", 2 * (number + 1), 1)
    assert len(list(accounts.tallies())) <= 20
    assert accounts.tally(busy) is kept


def test_a_changed_key_file_applies_to_an_owner_that_is_known() -> None:
    """Requests kept the share of the engine that the key had when the server saw it first."""
    accounts, owner = Accounts(), Owner("a" * 64, "a" * 64, 1.0, "alice", is_listed=True)
    accounts.tally(owner).requests += 1
    changed = accounts.tally(owner._replace(weight=0.1, key_name="bob"))
    assert (changed.owner.weight, changed.owner.name, changed.requests) == (0.1, "bob", 1)


def test_labels_are_bounded_however_often_keys_are_replaced() -> None:
    accounts = Accounts()
    for number in range(300):
        file = KeyFile(1, [])
        file.create(f"key{number}")
        [accepted] = file.accepted().values()
        accounts.tally(accepted.owner).requests += 1
    used = {label: counts["requests"] for label, counts, _ in accounts.by_label()}
    assert len(used) <= 66
    assert sum(used.values()) == 300
