"""Bad input gets a 4xx and a sentence that names the fault, and does not disturb other requests."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.e2e.kaon_server import MODEL, PLAIN_HTTP, START_SECONDS, KaonServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


def completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"model": MODEL, "prompt": "Hi", **fields}).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"model": MODEL, "messages": HI, **fields}).encode()


BAD: list[tuple[tuple[str, bytes], int, str]] = [
    (completion(temperature="hot"), 400, "temperature"),
    (completion(temperature=2.01), 400, "temperature"),
    (completion(temperature=True), 400, "temperature"),
    (completion(temperature=float("nan")), 400, "NaN"),
    (completion(top_p=float("inf")), 400, "Infinity"),
    (completion(top_p=-0.1), 400, "top_p"),
    (completion(presence_penalty=3), 400, "presence_penalty"),
    (completion(frequency_penalty=-3), 400, "frequency_penalty"),
    (completion(repetition_penalty=0), 400, "repetition_penalty"),
    (completion(max_tokens=-1), 400, "max_tokens"),
    (completion(max_tokens=0, min_tokens=1), 400, "min_tokens"),
    (completion(max_tokens=10**9, min_tokens=10**6), 400, "min_tokens"),
    (completion(max_tokens=10**30), 400, "max_tokens"),
    (completion(max_tokens="5"), 400, "max_tokens"),
    (completion(min_tokens=17), 400, "min_tokens"),
    (completion(n=0), 400, "n is 0"),
    (completion(n=129), 400, "n is 129"),
    (completion(n=128, prompt=["Hi"] * 17), 400, "prompt"),
    (completion(best_of=1, n=2), 400, "best_of"),
    (completion(best_of=129), 400, "best_of is 129"),
    (completion(best_of=2, stream=True), 400, "best_of"),
    (completion(best_of=128, prompt=["Hi"] * 17), 400, "prompt"),
    (completion(echo=True, logprobs=-1), 400, "logprobs"),
    (completion(prompt_logprobs=21), 400, "prompt_logprobs"),
    (completion(prompt_logprobs=10**30), 400, "prompt_logprobs"),
    (completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (completion(allowed_token_ids=[2**31]), 400, "allowed_token_ids"),
    (completion(bad_words=["x" * 10**6]), 400, "bad_words"),
    (completion(bad_words=[5]), 400, "bad_words"),
    (completion(priority=10**12), 400, "priority"),
    (completion(repetition_penalty=1e-300), 400, "repetition_penalty"),
    ((COMPLETIONS, b'{"seed": ' + b"9" * 5000 + b"}"), 400, "digits"),
    ((COMPLETIONS, b'{"temperature": 1e999}'), 400, "64 bits"),
    (completion(suffix="x"), 400, "suffix"),
    (completion(prompt=""), 400, "prompt is empty"),
    (completion(prompt=[]), 400, "prompt"),
    (completion(prompt=[[]]), 400, "prompt"),
    (completion(prompt=None), 400, "prompt"),
    (completion(prompt={"text": "Hi"}), 400, "prompt"),
    (completion(prompt=["Hi", 5]), 400, "prompt"),
    (completion(prompt=[10**9]), 400, "1000000000"),
    (completion(prompt=[-1]), 400, "-1"),
    (completion(prompt=[10**40]), 400, "prompt"),
    (completion(prompt="word " * 50_000), 400, "context"),
    (completion(prompt=[5] * 100_000), 400, "100000 tokens"),
    (completion(stop=["a", "b", "c", "d", "e"]), 400, "stop"),
    (completion(stop=""), 400, "stop"),
    (completion(stop=5), 400, "stop"),
    (completion(stop="x" * 4097), 400, "4096 characters"),
    (completion(stop_token_ids=[10**9]), 400, "stop_token_ids"),
    (completion(stop_token_ids=["a"]), 400, "stop_token_ids"),
    (completion(logit_bias={"cat": 1}), 400, "logit_bias"),
    (completion(logit_bias={"5": 500}), 400, "logit_bias"),
    (completion(logit_bias={"999999999": 1}), 400, "logit_bias"),
    (completion(logprobs=21), 400, "logprobs"),
    (completion(seed=1.5), 400, "seed"),
    (completion(seed=2**70), 400, "seed"),
    (completion(stream="yes"), 400, "stream"),
    (completion(stream_options={"include_usage": True}), 400, "stream_options"),
    (completion(temprature=1), 400, "temprature"),
    (completion(model="gpt-17"), 404, "gpt-17"),
    (completion(model=None), 400, "model"),
    (completion(prompt="\ud800"), 400, "surrogate"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages=None), 400, "messages"),
    (chat(messages=[{"role": "robot", "content": "Hi"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0]"),
    (chat(messages=[{"role": "user", "content": [IMAGE]}]), 400, "messages[0].content[0]"),
    (chat(messages=[{"role": "user", "content": [AUDIO]}]), 400, "input_audio"),
    (chat(messages=[{"role": "user", "content": "\udfff"}]), 400, "surrogate"),
    (chat(messages=[{"role": "user", "content": "word " * 50_000}]), 400, "messages"),
    (chat(max_completion_tokens=10**6, min_tokens=10**5), 400, "min_tokens"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(tools=[{"type": "function", "function": {}}]), 400, "tools[0].function.name"),
    (chat(response_format={"type": "yaml"}), 400, "response_format"),
    (chat(top_logprobs=3), 400, "top_logprobs"),
    (chat(chat_template_kwargs={"tools": 1}), 400, "chat_template_kwargs"),
    (chat(prompt="Hi"), 400, "prompt"),
    (chat(model="gpt-17", stream=True), 404, "gpt-17"),
    ((COMPLETIONS, b""), 400, "empty"),
    ((COMPLETIONS, b"{"), 400, "JSON"),
    ((COMPLETIONS, b"[]"), 400, "object"),
    ((COMPLETIONS, b'"\xff"'), 400, "UTF-8"),
    ((COMPLETIONS, b"[" * 50_000), 400, "nested"),
    ((CHAT, b"prompt=Hi"), 400, "JSON"),
    ((COMPLETIONS, b'{"prompt": "' + b"x" * 4 * 2**20 + b'"}'), 413, "max_request_bytes"),
]


async def test_bad_input_is_refused_in_words_and_a_neighbours_stream_stays_the_same(server: KaonServer) -> None:
    neighbour = {
        "model": MODEL,
        "prompt": "A long story",
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }

    async def stream(http: httpx.AsyncClient) -> list[str]:
        async with http.stream("POST", COMPLETIONS, json=neighbour) as response:
            return [
                json.loads(line[6:])["choices"][0]["text"] async for line in response.aiter_lines() if '"text"' in line
            ]

    async with httpx.AsyncClient(base_url=server.url, timeout=START_SECONDS, verify=PLAIN_HTTP) as http:
        undisturbed = "".join(await stream(http))
        disturbed = asyncio.create_task(stream(http))
        for (path, body), status, says in BAD:
            response = await http.post(path, content=body)
            what = f"{body[:80]!r} got {response.status_code} {response.text[:200]}"
            assert response.status_code == status, what
            error = response.json()["error"]
            assert says in error["message"], what
            assert error["type"] == "invalid_request_error", what
            assert error["param"] is None or error["param"].split("[")[0].split(".")[0] in body.decode(), what
        assert "".join(await disturbed) == undisturbed


def test_an_unknown_model_has_openais_code(server: KaonServer) -> None:
    with server.http() as http:
        path, body = completion(model="gpt-17")
        assert http.post(path, content=body).json()["error"]["code"] == "model_not_found"
        missing = http.get("/v1/models/gpt-17")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_chunked_body_over_the_limit_is_refused_too(server: KaonServer) -> None:
    def body() -> Any:
        for _ in range(12):
            yield b" " * 2**20

    with server.http() as http:
        response = http.post(COMPLETIONS, content=body())
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert http.get("/livez").status_code == 200


@pytest.mark.parametrize("content_type", [None, "application/json", "application/json; charset=utf-8"])
def test_a_body_is_read_as_json_when_its_type_says_so_or_nothing(server: KaonServer, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    path, body = completion(max_tokens=2)
    with server.http() as http:
        assert http.post(path, content=body, headers=headers).status_code == 200
