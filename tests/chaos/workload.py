"""A mixed load of 32 deterministic requests, and `Outcome`, the parts of an answer that faults must not change.

`perform` sends one request and checks the form of its answer; `perform_all` sends all of them at the same time.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import httpx

from tests.chaos.outcomes import Outcome, merged, read_events, reduced
from tests.e2e.kaon_server import MODEL, PLAIN_HTTP, START_SECONDS

Fields: TypeAlias = dict[str, Any]


class Ask(NamedTuple):
    """One request: its path and its body."""

    path: str
    body: Fields

    @property
    def sequences(self) -> int:
        """The endpoint under which the server counts it."""
        count: int = self.body.get("best_of") or self.body.get("n", 1)
        return count


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code}: {response.text[:300]}")
        self.response = response


async def perform(http: httpx.AsyncClient, ask: Ask) -> Outcome:
    """The outcome of one request. Raises `Refused`, and `AssertionError` if the answer is malformed or failed."""
    if not ask.body.get("stream"):
        response = await http.post(ask.path, json=ask.body)
        if response.status_code != 200:
            raise Refused(response)
        outcome: Outcome = reduced(response.json())
        return outcome
    async with http.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code != 200:
            await response.aread()
            raise Refused(response)
        text = "".join([part async for part in response.aiter_text()])
    return merged(ask.path, read_events(text))


async def perform_all(url: str, asks: Mapping[str, Ask]) -> dict[str, Outcome]:
    """The outcomes of all requests, sent at the same time. Errors are raised with the request's name."""
    async with client(url) as http:

        async def named(name: str, ask: Ask) -> Outcome:
            try:
                return await perform(http, ask)
            except (Refused, AssertionError, httpx.HTTPError) as error:
                error.add_note(f"in the request {name!r}")
                raise

        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(named(name, ask)) for name, ask in asks.items()}
        return {name: task.result() for name, task in tasks.items()}


def client(url: str) -> httpx.AsyncClient:
    """A client without a limit of connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=START_SECONDS, limits=limits, verify=PLAIN_HTTP)


def _completion(prompt: str, max_tokens: int, **fields: Any) -> Ask:
    usage = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return Ask("/v1/completions", {**body, **usage, **fields})


def _chat(question: str, max_tokens: int, **fields: Any) -> Ask:
    usage = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return Ask("/v1/chat/completions", {**body, **usage, **fields})


def _response(question: str, max_tokens: int, **fields: Any) -> Ask:
    body = {"model": MODEL, "input": question, "max_output_tokens": max_tokens, "temperature": 0, "store": False}
    return Ask("/v1/responses", {**body, **fields})


def _json_schema(schema: Fields) -> Fields:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _object(**properties: Fields) -> Fields:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_REPORT = _object(
    title={"type": "string", "minLength": 150, "maxLength": 200}, pages={"type": "integer", "maximum": 99}
)
_PERSON = _object(name={"type": "string", "maxLength": 40}, age={"type": "integer", "minimum": 0, "maximum": 99})
_NUMBERS = _object(
    numbers={"type": "array", "items": {"type": "integer", "maximum": 99999}, "minItems": 60, "maxItems": 80}
)
_WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": _object(city={"type": "string", "maxLength": 40}),
}
_WRITE = {
    "name": "write",
    "description": "Write a note",
    "parameters": _object(text={"type": "string", "minLength": 200, "maxLength": 250}, loud={"type": "boolean"}),
}
_TOOLS = [{"type": "function", "function": function} for function in (_WEATHER, _WRITE)]
_NAMED = {"type": "function", "function": {"name": "write"}}
_DRAWN = {"temperature": 1.0, "seed": 17}
_STREAM = {"stream": True}

WORKLOAD: dict[str, Ask] = {
    "greedy": _completion("Once upon a time", 700, **_STREAM),
    "greedy, short": _completion("The capital of France is", 20, **_STREAM),
    "greedy, whole": _completion("In a green valley", 400),
    "greedy, whole, short": _completion("A list of colours:", 30),
    "greedy, long prompt": _completion("The river went on and on. " * 150, 300, **_STREAM),
    "drawn until the end of text": _completion("A story about a turtle", 300, ignore_eos=False, **_STREAM, **_DRAWN),
    "drawn": _completion("Once upon a time", 600, **_STREAM, **_DRAWN),
    "drawn, hot": _completion("Tell me", 400, stream=True, temperature=1.8, seed=3),
    "drawn, whole": _completion("Tell me", 500, **_DRAWN),
    "drawn, filtered": _completion("A story", 300, top_k=40, top_p=0.9, min_p=0.01, **_STREAM, **_DRAWN),
    "drawn, a negative seed": _completion("A story", 150, stream=True, temperature=1.0, seed=-5),
    "penalties": _completion(
        "A story",
        400,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        **_STREAM,
        **_DRAWN,
    ),
    "bias and words barred": _completion(
        "A story", 200, logit_bias={"300": 4, "301": -90}, bad_words=["the", " a"], **_STREAM, **_DRAWN
    ),
    "three choices": _completion("Once", 250, n=3, **_STREAM, **_DRAWN),
    "four choices, whole": _completion("Once", 120, n=4, **_DRAWN),
    "the best of three": _completion("Once", 100, best_of=3, **_DRAWN),
    "stop strings": _completion("Once upon a time", 600, stop=["zebra", "turtle called"], **_STREAM, **_DRAWN),
    "a stop string kept, whole": _completion(
        "The", 400, stop=["ed ", ". A"], include_stop_str_in_output=True, **_DRAWN
    ),
    "log probabilities": _completion("In a", 300, logprobs=5, **_STREAM, **_DRAWN),
    "echo with log probabilities": _completion("Some words to be read", 150, echo=True, logprobs=2),
    "log probabilities of the prompt": _completion("Some words to be read", 200, prompt_logprobs=2, **_STREAM),
    "a regular expression": _completion(
        "Letters:", 700, structured_outputs={"regex": "([a-z]{2,9} ){80}end"}, **_STREAM, **_DRAWN
    ),
    "a JSON schema": _completion("A person", 200, response_format=_json_schema(_PERSON), **_DRAWN),
    "chat": _chat("Tell me a story", 400, ignore_eos=True, **_STREAM),
    "chat, drawn, log probabilities": _chat(
        "Who are you?", 250, ignore_eos=True, logprobs=True, top_logprobs=3, **_STREAM, **_DRAWN
    ),
    "chat, a long JSON answer": _chat("Numbers", 900, response_format=_json_schema(_NUMBERS), **_STREAM, **_DRAWN),
    "chat, a JSON answer, whole": _chat("A report", 600, response_format=_json_schema(_REPORT), n=2, **_DRAWN),
    "chat, a named tool": _chat("Hello!", 500, tools=_TOOLS, tool_choice=_NAMED, **_STREAM, **_DRAWN),
    "chat, a tool required, whole": _chat("Hello!", 500, tools=_TOOLS, tool_choice="required", n=2, **_DRAWN),
    "response": _response("Tell me a story", 300, **_STREAM),
    "response, a tool required": _response(
        "Hello!",
        500,
        tools=[{"type": "function", **_WRITE}],
        tool_choice="required",
        **_STREAM,
    ),
    "response, whole": _response("What is the capital of France?", 60),
}
"""Requests by name. Together they have 41 sequences of 10 to 900 tokens."""

SOME = dict(list(WORKLOAD.items())[::3])
"""A third of them, with most kinds of requests."""
