"""Streams that are cut at any point continue byte for byte with the header `Last-Event-ID`."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.kaon_server import KaonServer, eventually

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me about France."}]},
    "/v1/completions": {"prompt": "Once upon a time", "n": 2},
}
COMMON = {"model": "kaon-demo", "temperature": 0, "max_tokens": 30, "stream": True}


def events(response: httpx.Response) -> Iterator[str]:
    """The stream's events as they arrive, without comments."""
    text = ""
    for chunk in response.iter_text():
        text += chunk
        *complete, text = text.split("\n\n")
        yield from (event for event in complete if not event.startswith(":"))


def cut_and_resumed(http: httpx.Client, path: str, body: dict[str, Any], cuts: list[int]) -> list[str]:
    """The events for a client whose connection is lost after each of these numbers of events."""
    received: list[str] = []
    while not received or "[DONE]" not in received[-1]:
        headers = {"x-kaon-resumable": "true"}
        if received:
            headers["Last-Event-ID"] = received[-1].partition("\n")[0].removeprefix("id: ")
        left = cuts.pop(0) if cuts else -1
        with http.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for event in events(response):
                received.append(event)
                left -= 1
                if not left:
                    break
    return received


def texts(received: list[str]) -> dict[int, str]:
    """The text of each choice. Its division into events depends on how fast the client reads."""
    found: dict[int, str] = {}
    for event in received[:-1]:
        for choice in json.loads(event.partition("data: ")[2])["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_cut_off_after_any_event_goes_on_where_it_was(server: KaonServer, path: str) -> None:
    body = {**BODIES[path], **COMMON}
    with server.http() as http:
        plain = list(events(http.post(path, json=body)))
        assert not any(event.startswith("id: ") for event in plain)
        chance = random.Random(0)
        cuts = [*([cut] for cut in range(1, 12)), [chance.randint(1, 4) for _ in range(20)]]
        for cut in cuts:
            received = cut_and_resumed(http, path, body, cut)
            ids = [event.partition("\n")[0].partition(":")[2].strip().rpartition(":") for event in received]
            assert [int(number) for _, _, number in ids] == list(range(len(received)))
            assert len({stream for stream, _, _ in ids}) == 1
            assert texts(received) == texts(plain)
    eventually(lambda: server.metric("kaon_requests_live") == 0)


@pytest.mark.slow
def test_two_hundred_streams_cut_off_after_every_event_are_whole(server: KaonServer) -> None:
    with server.http() as http:
        for seed in range(200):
            path = list(BODIES)[seed % 2]
            body = {**BODIES[path], **COMMON, "temperature": 1.0, "seed": seed, "max_tokens": 12, "n": 1 + seed % 3}
            whole = texts(list(events(http.post(path, json=body))))
            assert texts(cut_and_resumed(http, path, body, [1] * 1000)) == whole


def test_a_stream_is_resumed_while_it_is_computed(server: KaonServer) -> None:
    path = "/v1/completions"
    body = {"prompt": "Hello", **COMMON, "max_tokens": 1500, "ignore_eos": True, "stream_options": {"resumable": True}}
    with server.http() as http:
        with http.stream("POST", path, json=body) as response:
            first = next(events(response))
        assert server.metric("kaon_requests_live") == 1
        headers = {"Last-Event-ID": first.partition("\n")[0].removeprefix("id: ")}
        rest = list(events(http.post(path, json=body, headers=headers)))
        numbers = [int(event.partition("\n")[0].rpartition(":")[2]) for event in rest]
        assert numbers == list(range(1, 1 + len(rest)))
        tokens = [json.loads(event.partition("data: ")[2]) for event in rest[:-1]]
        assert tokens[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("id", "status"), [("x", 400), ("cmpl-1:5", 404)])
def test_what_cannot_be_resumed_is_a_sentence(server: KaonServer, id: str, status: int) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={}, headers={"Last-Event-ID": id})
    assert answer.status_code == status
    assert "Last-Event-ID" in answer.json()["error"]["message"]
