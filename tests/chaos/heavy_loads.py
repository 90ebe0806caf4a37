"""Heavy owners in a process of their own, and the share of an owner among them.

`python -m tests.chaos.heavy_loads URL MODEL LOADS KEYS...` sends without end, the N-th key the N-th of the loads named
in `LOADS`, separated by commas, from four clients, each as soon as the previous answer has arrived. With more keys
than loads it begins again. It runs at the lowest priority, so that clients do not take the server's processor time.
It prints a line when it begins; after SIGINT it prints the number of answers of each status to each load, as JSON.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.checkpoints import words
from tests.chaos.faults import ChaosServer
from tests.e2e.kaon_server import PLAIN_HTTP, START_SECONDS

CLIENTS_PER_KEY = 4
REFUSED_SECONDS = 0.05
"""Seconds between a 429 and the next request."""


def prompt(num_tokens: int, salt: int) -> str:
    """A prompt of words, each one token of the random checkpoints, with a beginning that no other prompt has."""
    vocabulary = words()
    return "".join(f" {vocabulary[(salt * 7919 + index * (salt % 13 + 1)) % 1024]}" for index in range(num_tokens))


class _Client:
    """Sends the requests of one key."""

    def __init__(self, http: httpx.AsyncClient, model: str, seed: str) -> None:
        self._http, self._model = http, model
        self._random = random.Random(seed)

    def _body(self, num_tokens: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
        text = prompt(num_tokens, self._random.randrange(10**6))
        body = {"model": self._model, "prompt": text, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return body | fields

    async def _ask(self, body: dict[str, Any]) -> int:
        return (await self._http.post("/v1/completions", json=body)).status_code

    async def long_prompts(self) -> int:
        return await self._ask(self._body(800, 2))

    async def choices(self) -> int:
        return await self._ask(self._body(20, 50, n=8, temperature=1))

    async def answers(self) -> int:
        return await self._ask(self._body(100, 100))

    async def long_answers(self) -> int:
        return await self._ask(self._body(200, 300))

    async def cancelled_answers(self) -> int:
        async with self._http.stream("POST", "/v1/completions", json=self._body(40, 1000, stream=True)) as answer:
            await asyncio.sleep(2)
        return answer.status_code

    async def schemas(self) -> int:
        number = self._random.randrange(10**6)
        schema = {"type": "object", "properties": {f"p{number}_{each}": {"type": "integer"} for each in range(300)}}
        return await self._ask(self._body(60, 30, ignore_eos=False, structured_outputs={"json": schema}))

    async def background_responses(self) -> int:
        text = prompt(60, self._random.randrange(10**6))
        body = {"model": self._model, "input": text, "max_output_tokens": 500, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", "/v1/responses", json=body | {"background": True}) as answer:
            await asyncio.sleep(2)
        return answer.status_code

    async def slow_readers(self) -> int:
        body = self._body(60, 400, stream=True, logprobs=5)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_raw(64)
            for _ in range(20):
                with contextlib.suppress(StopAsyncIteration):
                    await anext(chunks)
                await asyncio.sleep(0.2)
        return answer.status_code

    async def short_requests(self) -> int:
        return await self._ask(self._body(60, 10))

    async def connections(self) -> int:
        """Connections that are closed after a part of a head."""
        url = self._http.base_url
        for _ in range(30):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
            writer.close()
        await asyncio.sleep(0.05)
        return 200

    # -- further families of attacks

    async def tokenize(self) -> int:
        text = prompt(3000, self._random.randrange(10**6))
        return (await self._http.post("/tokenize", json={"model": self._model, "prompt": text})).status_code

    async def many_prompts(self) -> int:
        return await self._ask(self._body(0, 20, prompt=[f"{self._random.random()} {each}" for each in range(64)]))

    async def logprobs(self) -> int:
        return await self._ask(self._body(20, 50, n=16, temperature=1, logprobs=20))

    async def prompt_logprobs(self) -> int:
        return await self._ask(self._body(800, 1, echo=True, logprobs=20))

    async def stops(self) -> int:
        number = self._random.randrange(10**6)
        stops = {"stop": [f"{number} {each}" * 100 for each in range(4)], "stop_token_ids": list(range(400, 1400))}
        words = {"bad_words": [f"w{each}" for each in range(800)]}
        return await self._ask(
            self._body(60, 100, **stops, **words, logit_bias={str(each): -1 for each in range(900)})
        )

    async def tool_grammars(self) -> int:
        number = self._random.randrange(10**6)
        parameters = {"type": "object", "properties": {f"p{each}": {"type": "integer"} for each in range(10)}}
        tools = [
            {"type": "function", "function": {"name": f"f{number}_{each}", "parameters": parameters}}
            for each in range(10)
        ]
        body = {"messages": [{"role": "user", "content": "Call"}], "tools": tools, "tool_choice": "required"}
        answer = await self._http.post("/v1/chat/completions", json={"model": self._model, "max_tokens": 60, **body})
        return answer.status_code

    async def regexes(self) -> int:
        pattern = f"({self._random.randrange(10**6)}.*a.{{1,100}}){{1,}}"
        return await self._ask(self._body(20, 60, ignore_eos=False, structured_outputs={"regex": pattern}))

    async def cancelled_responses(self) -> int:
        text = prompt(60, self._random.randrange(10**6))
        body = {"model": self._model, "input": text, "max_output_tokens": 500, "ignore_eos": True, "background": True}
        answer = await self._http.post("/v1/responses", json=body)
        if answer.status_code == 200:
            await self._http.post(f"/v1/responses/{answer.json()['id']}/cancel")
        return answer.status_code

    async def resumed_streams(self) -> int:
        """Streams whose client is gone after each few events and comes back."""
        body = self._body(60, 200, stream=True, stream_options={"resumable": True})
        headers: dict[str, str] = {}
        for _ in range(8):
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    return answer.status_code
                events = [line async for line in _first(answer.aiter_lines(), 30) if line.startswith("id: ")]
            if not events:
                break
            headers["Last-Event-ID"] = events[-1].removeprefix("id: ")
        return 200

    async def batches(self) -> int:
        lines = "".join(
            json.dumps(
                {"custom_id": str(each), "method": "POST", "url": "/v1/completions", "body": self._body(60, 30)}
            )
            + "\n"
            for each in range(100)
        )
        answer = await self._http.post("/v1/files", files={"file": lines.encode()}, data={"purpose": "batch"})
        if answer.status_code != 200:
            return answer.status_code
        batch = {"input_file_id": answer.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await self._http.post("/v1/batches", json=batch)
        try:
            await asyncio.sleep(2)
        finally:
            # Also at the end of the load: the batches would run for minutes next to the loads after it.
            if answer.status_code == 200:
                await self._http.post(f"/v1/batches/{answer.json()['id']}/cancel")
        return answer.status_code

    async def refused_bodies(self) -> int:
        """Bodies of a megabyte of which the last field is wrong."""
        text = prompt(200_000, self._random.randrange(10**6))
        return (await self._http.post("/v1/completions", json={"prompt": text, "max_tokens": "x"})).status_code

    async def messages(self) -> int:
        content = str(self._random.randrange(10**6))
        chat = [{"role": role, "content": content} for role in ("user", "assistant")] * 150 + [
            {"role": "user", "content": "Go on"}
        ]
        body = {"model": self._model, "messages": chat, "max_tokens": 10}
        return (await self._http.post("/v1/chat/completions", json=body)).status_code

    async def templates(self) -> int:
        loop = "{% for a in range(999) %}{% for b in range(99) %}{% endfor %}{% endfor %}"
        body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": loop}
        return (await self._http.post("/tokenize", json={"model": self._model, **body})).status_code

    async def adapters(self) -> int:
        """Requests that a key without the scope `admin` may not send."""
        body = {"lora_name": str(self._random.random()), "lora_path": "/nonexistent"}
        return (await self._http.post("/v1/load_lora_adapter", json=body)).status_code

    async def refused_embeddings(self) -> int:
        """Texts to embed, for a model that only generates."""
        texts = [prompt(60, self._random.randrange(10**6)) for _ in range(64)]
        return (await self._http.post("/v1/embeddings", json={"model": self._model, "input": texts})).status_code


async def _first(lines: AsyncIterator[str], number: int) -> AsyncIterator[str]:
    """Yield the first lines of a stream."""
    for _ in range(number):
        with contextlib.suppress(StopAsyncIteration):
            yield await anext(lines)


LOADS: dict[str, Callable[[_Client], Awaitable[int]]] = {
    name: load for name, load in vars(_Client).items() if not name.startswith("_")
}
"""The kinds of load by name."""

REFUSALS = {"refused_bodies": 400, "adapters": 403, "refused_embeddings": 404}
"""The status of all answers to loads that are refused for what they ask. Answers to others have 200."""

_NO_ANSWER = 0
_OVER_LIMITS = {_NO_ANSWER, 429}
"""Statuses that any load may get next to others."""


async def _refuse_connection(answer: httpx.Response) -> None:
    """Raise `httpx.HTTPError` for the 503 of a server that serves as many connections as it may: it is no answer."""
    if answer.status_code == 503 and b"too_many_connections" in await answer.aread():
        raise httpx.RemoteProtocolError("the connection is refused")


async def _send(url: str, model: str, names: Sequence[str], keys: Sequence[str]) -> None:
    answers: dict[str, Counter[int]] = {name: Counter() for name in names}

    async def send(number: int, client: int) -> None:
        headers = {"Authorization": f"Bearer {keys[number]}"}
        options: dict[str, Any] = {"timeout": START_SECONDS, "verify": PLAIN_HTTP, "headers": headers}
        options["event_hooks"] = {"response": [_refuse_connection]}
        async with httpx.AsyncClient(base_url=url, **options) as http:
            sender = _Client(http, model, f"{number} {client}")
            name = names[number % len(names)]
            while True:
                try:
                    status = await LOADS[name](sender)
                except (httpx.HTTPError, OSError):
                    status = _NO_ANSWER
                answers[name][status] += 1
                if status in _OVER_LIMITS:
                    await asyncio.sleep(REFUSED_SECONDS)

    print("sending", flush=True)
    try:
        await asyncio.gather(
            *(send(number, client) for number in range(len(keys)) for client in range(CLIENTS_PER_KEY))
        )
    finally:
        print(json.dumps(answers))


@contextlib.contextmanager
def sent_to(server: ChaosServer, model: str, loads: Sequence[str], keys: Sequence[str]) -> Iterator[None]:
    """Send the loads during the block, print the numbers of their answers, and assert that each got the expected ones.

    Where several loads are sent, one may get no answer meanwhile.
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", __spec__.name, server.url, model, ",".join(loads), *keys]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the heavy clients did not start"
            yield
            assert process.poll() is None, "the heavy clients ended"
            process.send_signal(signal.SIGINT)
            answers, _ = process.communicate(timeout=START_SECONDS)
        finally:
            process.kill()
    print(f"answers: {answers.strip()}", flush=True)
    for load, numbers in json.loads(answers).items():
        statuses, expected = set(map(int, numbers)), REFUSALS.get(load, 200)
        assert statuses <= {expected, *_OVER_LIMITS}, (load, numbers)
        # A batch runs for two seconds before its answer counts, and may have had none so far.
        is_early = load == "batches" and not numbers
        assert len(loads) > 1 or is_early or expected in statuses, (load, numbers)


class FairShare(NamedTuple):
    """The output of one owner's streams while others competed, between two readings of the metrics.

    A fair share is max-min fair: an owner's equal part of all tokens, or its demand if that is less. A stream can use
    one token of each step that decodes, so demand is the number of streams times the number of such steps.
    """

    tokens: float
    """Tokens of the owner's streams."""
    all_tokens: float
    """Tokens of all owners."""
    steps: float
    """Number of steps that decoded."""
    streams: int
    owners: int
    seconds: float

    @property
    def part(self) -> float:
        return self.tokens / self.all_tokens

    @property
    def demand(self) -> float:
        """The fair share, as a part of all tokens."""
        return self.streams * self.steps / self.all_tokens

    @property
    def of_fair(self) -> float:
        """The owner's tokens as a multiple of its fair share."""
        return self.part / min(self.demand, 1 / self.owners)

    @classmethod
    def between(
        cls, before: dict[str, float], after: dict[str, float], key: str, *, streams: int, owners: int, seconds: float
    ) -> "FairShare":
        def grown(*names: str) -> float:
            return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

        return cls(
            tokens=grown(f'kaon_key_output_tokens_total{{key="{key}"}}'),
            all_tokens=grown("kaon_generation_tokens_total"),
            steps=grown(*(f'kaon_step_duration_seconds_count{{kind="{kind}"}}' for kind in ("decode", "mixed"))),
            streams=streams,
            owners=owners,
            seconds=seconds,
        )

    def __str__(self) -> str:
        return (
            f"{self.streams} streams got {self.part:.1%} of the tokens, where an equal part is {1 / self.owners:.1%} "
            f"and their demand {self.demand:.1%}: {self.of_fair:.2f} of the fair share, "
            f"{self.tokens / self.seconds:.0f} tokens a second"
        )


if __name__ == "__main__":
    os.nice(19)
    # A shell starts a command in the background with SIGINT ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_send(sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4:]))
