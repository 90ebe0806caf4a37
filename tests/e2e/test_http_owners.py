"""Several keys at one server: none sees another's prompts, takes what others need, or waits for their work."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.limits.key_file import KeyFile
from tests.e2e.kaon_server import LASTING, MODEL, PLAIN_HTTP, START_SECONDS, KaonServer, eventually, free_port

HEAVY = ("prompts", "choices", "grammars", "background", "slow")
KEYS: dict[str, dict[str, Any]] = {
    "light": {},
    "other": {},
    "first": {"group": "team"},
    "second": {"group": "team"},
    "small": {"requests_per_minute": 3, "output_tokens_per_minute": 600},
    "admin": {"scopes": ["admin", "metrics", "inference"]},
    **{name: {} for name in HEAVY},
}
SETTINGS: dict[str, Any] = {
    "max_queued_requests": 8,
    "max_background_responses_per_key": 4,
    "trust_request_chat_template": True,
    "drain_timeout": 0,
}
SHORT = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
ENDLESS = {"model": MODEL, "prompt": "A story", "max_tokens": 3000, "ignore_eos": True}


class Team:
    """A server with a key file, and its keys."""

    def __init__(self, folder: Path, *, server_config: dict[str, Any] | None = None, **settings: Any) -> None:
        self.file = folder / "keys.json"
        content = KeyFile(1, [])
        self.keys = {name: content.create(name, **fields) for name, fields in KEYS.items()}
        content.save(self.file)
        self.server = KaonServer(
            folder / "log",
            free_port(),
            max_num_seqs=4,
            server_config={"api_key_file": str(self.file), **SETTINGS, **(server_config or {})},
            **settings,
        ).ready()

    def client(self, name: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.server.url,
            headers={"Authorization": f"Bearer {self.keys[name]}"},
            timeout=START_SECONDS,
            verify=PLAIN_HTTP,
            limits=httpx.Limits(max_connections=None),
        )

    def http(self, name: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=START_SECONDS, verify=PLAIN_HTTP)

    def ask(self, name: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        with self.http(name) as http:
            return http.post(path, json={**SHORT, **body} if path == "/v1/completions" else body)

    def limits(self, name: str) -> dict[str, Any]:
        with self.http(name) as http:
            answer: dict[str, Any] = http.get("/kaon/limits").json()
        return answer

    def is_idle(self) -> bool:
        with self.http("admin") as http:
            owners = http.get("/kaon/owners").json()["data"]
        busy = ("jobs", "requests", "queued_sequences", "queued_tokens", "background_responses")
        return not any(owner["in_use"][resource] for owner in owners for resource in busy)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    running = Team(tmp_path_factory.mktemp("team"))
    yield running
    eventually(running.is_idle)
    assert running.server.stop() == 0
    assert "Traceback" not in running.server.stderr


PROMPT = "Once upon a time there was a server that many people used at once, and each had a secret. " * 6


def cached(team: Team, name: str, prompt: str = PROMPT) -> int:
    usage = team.ask(name, prompt=prompt).json()["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_key_finds_its_own_prefixes_and_those_of_its_group_and_no_others(team: Team) -> None:
    assert cached(team, "light") == 0
    found = cached(team, "light")
    assert found >= 64
    assert cached(team, "other") == 0
    assert cached(team, "other") == found
    assert cached(team, "first") == 0
    assert cached(team, "second") == found


def test_a_response_is_read_continued_cancelled_and_deleted_by_its_key_only(team: Team) -> None:
    fields = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
    stored = team.ask("light", "/v1/responses", **fields).json()
    path = f"/v1/responses/{stored['id']}"
    with team.http("light") as mine, team.http("other") as yours:
        answers = [
            yours.get(path),
            yours.get(f"{path}/input_items"),
            yours.post(f"{path}/cancel"),
            yours.delete(path),
        ]
        assert [answer.status_code for answer in answers] == [404] * 4
        for other, words in (
            ({"previous_response_id": stored["id"]}, "not found"),
            ({"input": [{"type": "item_reference", "id": stored["output"][0]["id"]}]}, "no stored response has"),
        ):
            refused = yours.post("/v1/responses", json={**fields, **other})
            assert refused.status_code == 400, refused.text
            assert words in refused.json()["error"]["message"]
            assert mine.post("/v1/responses", json={**fields, **other}).status_code == 200
        assert mine.get(path).json()["id"] == stored["id"]
        assert [mine.delete(path).status_code, mine.get(path).status_code] == [200, 404]


@pytest.mark.slow  # Shares of connections: tests/unit/limits/test_connections.py.
def test_a_key_that_holds_connections_leaves_some_to_others(tmp_path: Path) -> None:
    """Readers of one background response wait in no queue, and each of them is served while it runs."""
    team = Team(tmp_path, server_config={"max_connections": 16}, **LASTING)
    try:
        endless = {"model": MODEL, "input": "A story", "max_output_tokens": 3000, "ignore_eos": True}
        with ExitStack() as stack:
            http = stack.enter_context(team.http("other"))
            body = {**endless, "background": True, "stream": True}
            events = stack.enter_context(http.stream("POST", "/v1/responses", json=body)).iter_lines()
            created = next(line for line in events if line.startswith("data: "))
            path = f"/v1/responses/{json.loads(created[6:])['response']['id']}?stream=true"
            statuses = Counter[int]()
            for _ in range(30):
                http = stack.enter_context(team.http("other"))
                statuses[stack.enter_context(http.stream("GET", path)).status_code] += 1
            assert set(statuses) == {200, 429}
            assert team.ask("light").status_code == 200
            assert team.limits("other")["in_use"]["served_requests"] == statuses[200] + 1
            assert team.limits("other")["used"]["refused"] == statuses[429]
        eventually(lambda: team.limits("other")["in_use"]["served_requests"] == 0)
    finally:
        assert team.server.stop() == 0


def test_with_a_shared_cache_every_key_finds_every_prefix(tmp_path: Path) -> None:
    team = Team(tmp_path, server_config={"share_prefix_cache": True})
    try:
        assert cached(team, "light") == 0
        assert cached(team, "other") >= 64
    finally:
        assert team.server.stop() == 0


def test_a_key_is_created_and_revoked_while_the_server_runs(team: Team) -> None:
    content = KeyFile.load(team.file)
    team.keys["new"] = content.create("new")
    content.save(team.file)
    eventually(lambda: team.ask("new").status_code == 200)
    content.revoke("new")
    content.save(team.file)
    eventually(lambda: team.ask("new").status_code == 401)
    assert team.ask("light").status_code == 200


def test_an_exceeded_quota_gives_429_with_openais_headers_to_its_owner_only(team: Team) -> None:
    answers = [team.ask("small", max_tokens=4, ignore_eos=True) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert left == [2, 1, 0, 0]
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-limit-tokens"] == "600"
    limits = team.limits("small")
    assert limits["used"] == {"requests": 3, "refused": 1, "prompt_tokens": limits["used"]["prompt_tokens"],
                              "output_tokens": 12}  # fmt: skip
    assert limits["quotas"]["requests"]["limit"] == 3
    assert "x-ratelimit-limit-requests" not in team.ask("light").headers


def costly_schema(number: int) -> dict[str, Any]:
    """A grammar whose check takes the whole time limit."""
    return {"type": "object", "properties": {f"p{number}_{each}": {"type": "integer"} for each in range(3000)}}


async def others_first(team: Team, path: str, heavy: list[dict[str, Any]], light: dict[str, Any]) -> None:
    """Send all of `heavy` and then `light`, which is answered while most of the others wait."""
    async with team.client("grammars") as busy, team.client("light") as quick:
        tasks = [asyncio.create_task(busy.post(path, json=body)) for body in heavy]
        while team.limits("grammars")["in_use"]["jobs"] < len(heavy) // 2:
            assert not all(task.done() for task in tasks)
            await asyncio.sleep(0.02)
        answer = await quick.post(path, json=light)
        done = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert answer.status_code == 200, answer.text
    assert done <= len(heavy) // 2
    eventually(team.is_idle)


async def test_a_schema_does_not_wait_for_another_keys_costly_ones(team: Team) -> None:
    def body(schema: dict[str, Any]) -> dict[str, Any]:
        return {**SHORT, "structured_outputs": {"json": schema}}

    fresh = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 7}}}
    await others_first(team, "/v1/completions", [body(costly_schema(each)) for each in range(12)], body(fresh))


async def test_a_template_does_not_wait_for_another_keys_costly_ones(team: Team) -> None:
    def body(template: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template}

    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    heavy = [body(f"{{# {each} #}}{loop}") for each in range(12)]
    await others_first(team, "/tokenize", heavy, body("{{ messages[0].content }}"))


async def test_whoever_overloads_the_server_is_refused_and_the_others_are_not(team: Team) -> None:
    """Five keys send a kind of load each, as fast as they are answered; another key sends requests at intervals."""
    statuses: dict[str, Counter[int]] = {name: Counter() for name in (*HEAVY, "light")}
    stop = asyncio.Event()

    async def post(http: httpx.AsyncClient, name: str, path: str, body: dict[str, Any]) -> None:
        answer = await http.post(path, json=body)
        statuses[name][answer.status_code] += 1
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            await asyncio.sleep(0.05)

    async def read_slowly(http: httpx.AsyncClient, name: str) -> None:
        async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
            statuses[name][answer.status_code] += 1
            if answer.status_code == 200:
                await stop.wait()
            else:
                await asyncio.sleep(0.05)

    def request(http: httpx.AsyncClient, name: str, number: int) -> Coroutine[Any, Any, None]:
        if name == "prompts":
            return post(http, name, "/v1/completions", {**SHORT, "prompt": f"{number} " + "word " * 600})
        if name == "choices":
            return post(http, name, "/v1/completions", {**SHORT, "n": 8, "max_tokens": 40, "ignore_eos": True})
        if name == "grammars":
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
            return post(http, name, "/v1/completions", {**SHORT, "structured_outputs": {"json": schema}})
        if name == "background":
            body = {"model": MODEL, "input": "A story", "max_output_tokens": 200, "ignore_eos": True}
            return post(http, name, "/v1/responses", {**body, "background": True, "stream": number % 2 == 0})
        return read_slowly(http, name)

    async def load(name: str, worker: int) -> None:
        async with team.client(name) as http:
            number = worker * 10_000
            while not stop.is_set():
                number += 1
                await request(http, name, number)

    heavy = [asyncio.create_task(load(name, worker)) for name in HEAVY for worker in range(8)]
    async with team.client("light") as http, team.client("admin") as admin:
        while min(statuses[name][429] for name in HEAVY if name != "slow") < 1:
            assert not any(task.done() for task in heavy), [task for task in heavy if task.done()]
            await post(http, "light", "/v1/completions", {**SHORT, "n": 2})
        for number in range(10):
            await post(http, "light", "/v1/completions", {**SHORT, "prompt": f"{number}, and then"})
            assert (await admin.get("/livez")).status_code == 200
        owners = {each["name"]: each["used"] for each in (await admin.get("/kaon/owners")).json()["data"]}
        metrics = (await admin.get("/metrics")).text
    stop.set()
    for task in heavy:
        task.cancel()
    for task in heavy:
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await task
    assert set(statuses["light"]) == {200}
    assert owners["light"]["refused"] == 0
    assert sum(owners[name]["refused"] for name in HEAVY) >= 4
    assert 'kaon_key_refused_total{key="light"} 0.0' in metrics
    await cancel_background(team)


async def cancel_background(team: Team) -> None:
    """End what the key `background` still runs, whose answers were not read."""
    async with team.client("admin") as admin:

        async def running() -> int:
            owners = (await admin.get("/kaon/owners")).json()["data"]
            return sum(owner["in_use"]["background_responses"] for owner in owners)

        while await running():
            await asyncio.sleep(0.05)


def test_admin_calls_are_in_the_log(team: Team) -> None:
    with team.http("admin") as http:
        assert http.get("/kaon/owners").status_code == 200
    assert team.ask("light", "/kaon/owners").status_code in (403, 405)

    def audited(owner: str, status: int) -> bool:
        entries = (json.loads(line) for line in re.findall(r'\{"audit".*?\}', team.server.stderr))
        return any((entry["owner"], entry["status"]) == (owner, status) for entry in entries)

    # A thread writes the log.
    eventually(lambda: audited("admin", 200) and audited("light", 403))
