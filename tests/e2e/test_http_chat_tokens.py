"""Chats that report tokens: prompt log probabilities, token ids, and usage in each chunk."""

import json
from typing import Any

import pytest

from tests.e2e.kaon_server import MODEL, KaonServer

HI = [{"role": "user", "content": "What is 12 + 7?"}]
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "return_token_ids": True, "prompt_logprobs": 1, "n": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_shows_its_tokens_on_request(server: KaonServer, stream: bool) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream": True, "stream_options": usage} if stream else {}
    with server.http() as http:
        text = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, **FIELDS, **options}).text
    answers = [json.loads(block[6:]) for block in text.split("\n\n")[:-2]] if stream else [json.loads(text)]
    (ids,) = [answer["prompt_token_ids"] for answer in answers if "prompt_token_ids" in answer]
    (read,) = [answer["prompt_logprobs"] for answer in answers if "prompt_logprobs" in answer]
    assert read[0] is None
    assert all(str(token_id) in entry for token_id, entry in zip(ids[1:], read[1:], strict=True))
    choices = [choice for answer in answers for choice in answer["choices"]]
    for index in range(2):
        reported = [token for choice in choices if choice["index"] == index for token in choice.get("token_ids", ())]
        assert 1 <= len(reported) <= 6
    if stream:
        counts = [answer["usage"]["completion_tokens"] for answer in answers]
        assert counts == sorted(counts)
        assert counts[-1] == sum(len(choice.get("token_ids", ())) for choice in choices)
        assert {answer["usage"]["prompt_tokens"] for answer in answers} == {len(ids)}


def test_a_chat_shows_no_tokens_unasked(server: KaonServer) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 2}).json()
    assert not {"prompt_logprobs", "prompt_token_ids"} & answer.keys()
    assert "token_ids" not in answer["choices"][0]
