"""The owner for whom a batch's lines run, after its client has disconnected."""

import json
from types import SimpleNamespace
from typing import Any, cast

from starlette.types import Receive, Scope, Send

from server.batches.lines import Line
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore
from server.limits.accounts import Accounts
from server.limits.jobs import Jobs
from server.limits.owners import Owner, Quotas

ALICE = Owner("a" * 64, "a" * 64, 2.0, "alice", group="team", quotas=Quotas(5))


class Record:
    """A store that records each line's result, behind an application that records its owner."""

    def __init__(self, *statuses: int) -> None:
        """`statuses` are those of the answers to the line's attempts."""
        self.statuses = [*statuses, 200]
        self.owners: list[Owner] = []
        self.lines: list[tuple[dict[str, Any], bool]] = []

    def record(self, id: str, number: int, output: bytes, *, succeeded: bool) -> None:
        self.lines.append((json.loads(output), succeeded))

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.owners.append(scope["state"]["owner"])
        await send({"type": "http.response.start", "status": self.statuses.pop(0), "headers": []})
        await send({"type": "http.response.body", "body": b'{"ok": true}'})

    def content(self, batch: Any, line: Line) -> bytes:
        return b'{"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}'

    async def run(self, *holders: Owner | None) -> None:
        """Run a line. `holders` are the owners that its key has at each attempt."""
        each = iter(holders)
        runner = BatchRunner(
            cast(BatchStore, self), self.answer, lambda: 0, 4, Jobs(Accounts()), lambda digest: next(each)
        )
        batch = SimpleNamespace(
            object=SimpleNamespace(id="batch_1", endpoint="/v1/completions"), owner=ALICE.key, party=ALICE.party
        )
        body = b'{"model": "m", "prompt": "x"}'
        await runner._run_line(cast(Any, batch), Line(0, "one", 0, 100), [body])


async def test_a_line_runs_with_its_keys_group_and_quotas_as_a_party_of_its_own() -> None:
    record = Record()
    await record.run(ALICE)
    [owner] = record.owners
    assert (owner.group, owner.quotas, owner.key) == ("team", Quotas(5), ALICE.key)
    assert owner.party == f"{ALICE.party} (batches)"
    assert 0 < owner.weight < ALICE.weight
    [(output, succeeded)] = record.lines
    assert succeeded
    assert output["response"]["status_code"] == 200


async def test_a_line_of_a_revoked_key_is_a_401_and_runs_nothing() -> None:
    record = Record()
    await record.run(None)
    assert record.owners == []
    [(output, succeeded)] = record.lines
    assert not succeeded
    assert output["custom_id"] == "one"
    assert output["response"]["status_code"] == 401
    assert "revoked" in output["response"]["body"]["error"]["message"]


async def test_a_line_that_waits_for_its_quota_is_a_401_once_its_key_is_revoked() -> None:
    """As many lines as may run at a time went on for as long as the quota made them wait."""
    record = Record(429)
    await record.run(ALICE, None)
    assert len(record.owners) == 1
    [(output, succeeded)] = record.lines
    assert (output["response"]["status_code"], succeeded) == (401, False)


async def test_a_line_runs_with_what_its_key_is_now() -> None:
    record = Record(429)
    await record.run(ALICE, ALICE._replace(quotas=Quotas(7)))
    assert [owner.quotas for owner in record.owners] == [Quotas(5), Quotas(7)]
    record = Record()
    await record.run(ALICE._replace(scopes=frozenset({"metrics"})))
    assert record.owners == []
    assert record.lines[0][0]["response"]["status_code"] == 401
