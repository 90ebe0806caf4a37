"""Keys that attack each other through shared resources: the effect on the attacked key, in figures."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from server.limits.key_file import KeyFile
from tests.chaos.faults import ChaosServer
from tests.e2e.kaon_server import MODEL, PLAIN_HTTP, START_SECONDS

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = pytest.mark.slow

HEAVY = [f"heavy{number}" for number in range(10)]
STORED_BYTES = 2**20
KEYLESS = "/livez,/readyz,/health,/metrics"
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
VICTIM: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story about a victim",
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


class Owners:
    """A server with a key file."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`options`: further options of the server."""
        content = KeyFile(1, [])
        self.keys = {name: content.create(name) for name in ("light", *HEAVY)}
        content.save(folder / "keys.json")
        self.server = ChaosServer(
            folder / "log",
            *("--api-key-file", str(folder / "keys.json"), "--keyless-paths", KEYLESS),
            *("--max-stored-response-bytes", str(STORED_BYTES), "--trust-request-chat-template", *options),
        ).ready()

    def client(self, name: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.server.url,
            headers={"Authorization": f"Bearer {self.keys[name]}"},
            timeout=START_SECONDS,
            verify=PLAIN_HTTP,
            limits=httpx.Limits(max_connections=None),
        )

    def in_use(self, name: str, resource: str) -> float:
        return self.server.metrics().get(f'kaon_key_in_use{{key="{name}",resource="{resource}"}}', 0.0)


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    running = Owners(tmp_path_factory.mktemp("owners"), "--dtype", "float32")
    try:
        yield running
        assert "Traceback" not in running.server.stderr
    finally:
        running.server.end()


class Stream(NamedTuple):
    """Observations of a stream by its client."""

    text: str
    ttft: float
    longest_gap: float


async def stream(http: httpx.AsyncClient, body: dict[str, Any] = VICTIM) -> Stream:
    began = before = time.monotonic()
    text, ttft, longest = "", 0.0, 0.0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                if ttft:
                    longest = max(longest, now - before)
                else:
                    ttft = now - began
                before = now
                text += json.loads(line[len("data: ") :])["choices"][0]["text"]
    return Stream(text, ttft, longest)


@contextlib.asynccontextmanager
async def attack(*work: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run endless work during the block."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [each for each in outcomes if isinstance(each, Exception) and not isinstance(each, httpx.HTTPError)]
    assert not failures


async def slowest_probe(server: ChaosServer, until: asyncio.Event) -> float:
    slowest = 0.0
    async with httpx.AsyncClient(base_url=server.url, verify=PLAIN_HTTP, timeout=START_SECONDS) as http:
        while not until.is_set():
            began = time.monotonic()
            assert (await http.get("/livez")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)
    return slowest


async def test_background_responses_keep_within_the_stored_bytes(owners: Owners) -> None:
    """A key runs as many background streams as it may, with 20 alternatives for each token."""
    server = owners.server
    body = {"model": MODEL, "input": "A story", "max_output_tokens": 3900, "ignore_eos": True, "background": True}
    body |= {"stream": True, "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    statuses: Counter[int] = Counter()

    async def run(http: httpx.AsyncClient) -> None:
        while True:
            async with http.stream("POST", "/v1/responses", json=body) as answer:
                statuses[answer.status_code] += 1
            await asyncio.sleep(0.1)

    async with owners.client("light") as light, owners.client(HEAVY[0]) as http:
        kept = [
            (await light.post("/v1/responses", json={"model": MODEL, "input": "Hi", "max_output_tokens": 2})).json()
        ]
        alone = await stream(light)
        before, largest, stored = server.resident()[0], 0, 0.0
        done = asyncio.Event()
        async with attack(*(run(http) for _ in range(8))):
            probing = asyncio.create_task(slowest_probe(server, done))
            loaded: list[Stream] = []
            end = time.monotonic() + 20
            while time.monotonic() < end:
                loaded.append(await stream(light))
                largest = max(largest, server.resident()[0])
                stored = max(stored, await asyncio.to_thread(owners.in_use, HEAVY[0], "stored_bytes"))
            done.set()
            slowest = await probing
        for each in kept:
            assert (await light.get(f"/v1/responses/{each['id']}")).status_code == 200
    assert stored <= STORED_BYTES
    assert statuses[200] > 1
    assert {each.text for each in loaded} == {alone.text}
    print(
        f"background: {statuses[200]} accepted, {statuses[429]} refused in 20 s; stored at most {stored / 2**20:.2f} "
        f"of {STORED_BYTES / 2**20:.0f} MiB, API process {before / 1e6:.0f} to {largest / 1e6:.0f} MB; /livez at most "
        f"{slowest:.2f} s; another key's stream: longest gap {max(each.longest_gap for each in loaded):.2f} s "
        f"({alone.longest_gap:.2f} alone), bytes equal"
    )


def costly_schema(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}_{each}": {"type": "integer"} for each in range(3000)}}


def schema_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {**SHORT, "structured_outputs": {"json": schema}}


def template_body(template: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template}


LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "path", "light", "heavy"),
    [
        (
            "schema",
            "/v1/completions",
            lambda number: schema_body({"type": "object", "properties": {f"q{number}": {"type": "string"}}}),
            lambda number: schema_body(costly_schema(number)),
        ),
        (
            "template",
            "/tokenize",
            lambda number: template_body(f"{number} {{{{ messages[0].content }}}}"),
            lambda number: template_body(f"{number} {LOOP}"),
        ),
    ],
)
async def test_costly_work_of_a_key_delays_itself(
    name: str,
    path: str,
    light: Callable[[int], dict[str, Any]],
    heavy: Callable[[int], dict[str, Any]],
    owners: Owners,
) -> None:
    async def timed(http: httpx.AsyncClient, number: int) -> float:
        began = time.monotonic()
        answer = await http.post(path, json=light(number))
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began

    async def keep_busy(http: httpx.AsyncClient, first: int) -> None:
        number = first
        while True:
            await http.post(path, json=heavy(number))
            number += 100

    async with owners.client("light") as quick, owners.client(HEAVY[0]) as busy:
        await timed(quick, 0)
        alone = [await timed(quick, 1000 + number) for number in range(5)]
        async with attack(*(keep_busy(busy, number) for number in range(25))):
            while await asyncio.to_thread(owners.in_use, HEAVY[0], "jobs") < 20:
                await asyncio.sleep(0.05)
            loaded = [await timed(quick, 2000 + number) for number in range(5)]
    print(
        f"{name}: {max(alone):.2f} s at most alone, {max(loaded):.2f} s next to 25 costly ones of another key "
        f"(median {sorted(loaded)[2]:.2f} s)"
    )


async def test_a_key_that_stores_much_evicts_only_its_own(owners: Owners) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
    async with owners.client("light") as light, owners.client(HEAVY[0]) as heavy:
        mine = [(await light.post("/v1/responses", json=body)).json()["id"] for _ in range(20)]
        for _ in range(65):
            answers = await asyncio.gather(*(heavy.post("/v1/responses", json=body) for _ in range(16)))
            assert {answer.status_code for answer in answers} == {200}
        found = [(await light.get(f"/v1/responses/{id}")).status_code for id in mine]
    print(f"store: after 1040 responses of another key, {found.count(200)} of {len(mine)} are kept")
    assert found.count(200) == len(mine)


async def test_large_tables_are_refused_or_cost_little(owners: Owners) -> None:
    tables = {
        "logit_bias": {str(token): 1.0 for token in range(1000)},
        "stop_token_ids": list(range(1000)),
        "bad_words": [chr(97 + number % 26) + str(number) for number in range(900)],
    }
    many = {**SHORT, **tables, "prompt": ["x"] * 16, "n": 128, "max_tokens": 2}
    most = {**SHORT, "logit_bias": {str(token): 1.0 for token in range(1024)}, "n": 128, "max_tokens": 2}
    async with owners.client("light") as light, owners.client(HEAVY[0]) as heavy:
        alone = await stream(light)
        before = owners.server.resident()[1]
        watching = asyncio.create_task(stream(light))
        await asyncio.sleep(0.1)
        refused = await heavy.post("/v1/completions", json=many)
        largest = await heavy.post("/v1/completions", json=most)
        loaded = await watching
        grown = owners.server.resident()[1] - before
    assert refused.status_code == 400
    assert "entries" in refused.json()["error"]["message"]
    assert largest.status_code == 200
    assert loaded.text == alone.text
    print(
        f"tables: 16 x 128 sequences are a 400; 128 with 1024 biases each: another key's longest gap "
        f"{loaded.longest_gap:.2f} s ({alone.longest_gap:.2f} alone), engine core {grown / 1e6:+.0f} MB"
    )


async def test_neither_usage_nor_timing_reveals_what_another_key_sent(owners: Owners) -> None:
    """The victim sends one of two long prompts; the attacker times both and guesses."""
    chance = random.Random(7)
    right, reported = 0, 0
    async with owners.client("light") as victim, owners.client(HEAVY[0]) as attacker:

        async def probe(prompt: str) -> float:
            nonlocal reported
            began = time.monotonic()
            body = {**SHORT, "prompt": prompt, "max_tokens": 1}
            answer = (await attacker.post("/v1/completions", json=body)).json()
            reported += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return time.monotonic() - began

        for number in range(40):
            prompts = [f"Secret {number} {side}: " + "a long and private text of one key " * 40 for side in "ab"]
            sent = chance.randrange(2)
            await victim.post("/v1/completions", json={**SHORT, "prompt": prompts[sent], "max_tokens": 1})
            order = [0, 1] if chance.random() < 0.5 else [1, 0]
            seconds = [0.0, 0.0]
            for side in order:
                seconds[side] = await probe(prompts[side])
            right += (seconds[1] < seconds[0]) == bool(sent)
    print(f"prefixes: {reported} cached tokens reported to the other key; {right} of 40 guesses by timing right")
    assert reported == 0
    assert right <= 33
