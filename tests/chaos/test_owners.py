"""Keys that attack each other through shared resources: the effect on the attacked key, in figures."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.limits.key_file import KeyFile
from tests.chaos.faults import ChaosServer
from tests.chaos.victim import AttackTable, Seen, watch, watching
from tests.e2e.kaon_server import MODEL, PLAIN_HTTP, START_SECONDS

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = [pytest.mark.slow, pytest.mark.attack_table]

HEAVY = [f"heavy{number}" for number in range(10)]
STORED_BYTES = 2**20
BACKGROUND_SECONDS = 12
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
        self.keys = {name: content.create(name) for name in ("light", "victim", *HEAVY)}
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

    def watching(self) -> contextlib.AbstractAsyncContextManager[Seen]:
        """A client of another key than those of the test."""
        return watching(self.server, VICTIM, self.keys["victim"])

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
    if failures:
        raise ExceptionGroup("endless work ended in errors", failures)


@pytest.fixture(scope="module")
def alone(owners: Owners) -> Seen:
    return asyncio.run(watch(owners.server, VICTIM, owners.keys["victim"], 2))


async def test_background_responses_keep_within_the_stored_bytes(
    owners: Owners, alone: Seen, attack_table: AttackTable
) -> None:
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

    before, largest, stored = server.resident()[0], 0, 0.0
    async with owners.client("light") as light, owners.client(HEAVY[0]) as http:
        small = {"model": MODEL, "input": "Hi", "max_output_tokens": 2}
        kept = (await light.post("/v1/responses", json=small)).json()
        async with attack(*(run(http) for _ in range(8))), owners.watching() as seen:
            end = time.monotonic() + BACKGROUND_SECONDS
            while time.monotonic() < end:
                await asyncio.sleep(0.2)
                largest = max(largest, server.resident()[0])
                stored = max(stored, await asyncio.to_thread(owners.in_use, HEAVY[0], "stored_bytes"))
        assert (await light.get(f"/v1/responses/{kept['id']}")).status_code == 200
    assert stored <= STORED_BYTES
    assert statuses[200] > 1
    attack_table.add(
        4,
        "background responses that grow past the limit of stored bytes",
        f"{statuses[200]} accepted, {statuses[429]} refused in {BACKGROUND_SECONDS} s; stored at most "
        f"{stored / 2**20:.2f} of {STORED_BYTES / 2**20:.0f} MiB, API process {before / 1e6:.0f} to "
        f"{largest / 1e6:.0f} MB",
        alone,
        seen,
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
    alone: Seen,
    attack_table: AttackTable,
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
        first = [await timed(quick, 1000 + number) for number in range(5)]
        async with attack(*(keep_busy(busy, number) for number in range(25))):
            while await asyncio.to_thread(owners.in_use, HEAVY[0], "jobs") < 20:
                await asyncio.sleep(0.05)
            async with owners.watching() as seen:
                await asyncio.sleep(2)
            loaded = [await timed(quick, 2000 + number) for number in range(5)]
    figure = f"{max(loaded):.2f} s at most, {sorted(loaded)[2]:.2f} in the median ({max(first):.2f} at most alone)"
    attack_table.add(6, f"a {name} of a key next to 25 costly ones of another", figure, alone, seen)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ ('{0.__class__}' | format)(1) }}",
    "{{ 'x' * 10**10 }}",
    "{{ range(10**9) | list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{{ messages.append(1) }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ 'a'.join(['b'] * 10**9) }}",
    "{{ 10**(10**9) }}",
]


async def test_templates_that_try_to_escape_are_refused(
    owners: Owners, alone: Seen, attack_table: AttackTable
) -> None:
    """What the process of such a template can do is tested by tests/unit/text/test_sandbox.py."""
    before = owners.server.resident()[0]
    async with owners.client(HEAVY[0]) as heavy, owners.watching() as seen:
        answers = [await heavy.post("/tokenize", json=template_body(each)) for each in ESCAPES]
    assert {answer.status_code for answer in answers} == {400}
    grown = owners.server.resident()[0] - before
    figure = f"{len(ESCAPES)} of {len(ESCAPES)} are a 400; API process {grown / 1e6:+.0f} MB"
    attack_table.add(12, "templates that try to escape, or to take memory", figure, alone, seen)


async def test_a_key_that_stores_much_evicts_only_its_own(
    owners: Owners, alone: Seen, attack_table: AttackTable
) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
    async with owners.client("light") as light, owners.client(HEAVY[0]) as heavy:
        mine = [(await light.post("/v1/responses", json=body)).json()["id"] for _ in range(20)]
        async with owners.watching() as seen:
            for _ in range(65):
                answers = await asyncio.gather(*(heavy.post("/v1/responses", json=body) for _ in range(16)))
                assert {answer.status_code for answer in answers} == {200}
        found = [(await light.get(f"/v1/responses/{id}")).status_code for id in mine]
    assert found.count(200) == len(mine)
    figure = f"{found.count(200)} of {len(mine)} of another key are kept"
    attack_table.add(7, "1040 stored responses of one key", figure, alone, seen)


async def test_large_tables_are_refused_or_cost_little(owners: Owners, alone: Seen, attack_table: AttackTable) -> None:
    tables = {
        "logit_bias": {str(token): 1.0 for token in range(1000)},
        "stop_token_ids": list(range(1000)),
        "bad_words": [chr(97 + number % 26) + str(number) for number in range(900)],
    }
    many = {**SHORT, **tables, "prompt": ["x"] * 16, "n": 128, "max_tokens": 2}
    most = {**SHORT, "logit_bias": {str(token): 1.0 for token in range(1024)}, "n": 128, "max_tokens": 2}
    async with owners.client(HEAVY[0]) as heavy:
        before = owners.server.resident()[1]
        async with owners.watching() as seen:
            for _ in range(4):
                refused = await heavy.post("/v1/completions", json=many)
                largest = await heavy.post("/v1/completions", json=most)
        grown = owners.server.resident()[1] - before
    assert refused.status_code == 400
    assert "entries" in refused.json()["error"]["message"]
    assert largest.status_code == 200
    figure = f"16 x 128 sequences with 2900 entries: 400; 128 with 1024: engine core {grown / 1e6:+.0f} MB"
    attack_table.add(9, "sequences with large tables", figure, alone, seen)


async def test_neither_usage_nor_timing_reveals_what_another_key_sent(
    owners: Owners, alone: Seen, attack_table: AttackTable
) -> None:
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
        # The victim's stream would disturb the times, so that it is read next to further guesses.
        async with owners.watching() as seen:
            for number in range(40):
                await probe(f"Secret {number}: " + "a long and private text of one key " * 40)
    figure = f"{reported} cached tokens reported to the other key; {right} of 40 guesses right"
    attack_table.add(5, "guesses of another key's prompts by usage and timing", figure, alone, seen)
    assert reported == 0
    assert right <= 33
