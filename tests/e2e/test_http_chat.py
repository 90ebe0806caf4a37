"""`/v1/chat/completions` through the official client."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.kaon_server import MODEL

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def ask(client: openai.OpenAI, messages: list[Any] = MESSAGES, **fields: Any) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 20, "temperature": 0, **LONG, **fields}
    )


def ask_streamed(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    stream = client.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "temperature": 0, **LONG, **fields}, stream=True
    )
    return list(stream)


def test_an_answer_has_openais_shape(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details is not None


def test_streamed_text_equals_whole_text(client: openai.OpenAI) -> None:
    chunks = ask_streamed(client, n=2)
    whole = ask(client, n=2)
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
        assert choices[-1].finish_reason == "length"


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    *chunks, last = ask_streamed(client, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_a_token_each(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    if stream:
        choices = [choice for chunk in ask_streamed(client, **fields) for choice in chunk.choices]
        content = [each for choice in choices if choice.logprobs for each in choice.logprobs.content or ()]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        (choice,) = ask(client, **fields).choices
        assert choice.logprobs is not None
        content, text = choice.logprobs.content or [], choice.message.content or ""
    assert len(content) == 20
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)
    shown = [each for each in content if not each.token.startswith("<|")]
    assert bytes(byte for each in shown for byte in each.bytes or ()).decode(errors="replace") == text


def test_without_a_limit_the_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=None, extra_body={"stop_token_ids": list(range(1536))})
    assert answer.choices[0].finish_reason == "stop"


def test_parts_and_a_plain_string_are_the_same_content(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]
    assert ask(client, [MESSAGES[0], {"role": "user", "content": parts}]).choices[0].message == (
        ask(client).choices[0].message
    )


def test_tools_are_shown_to_the_model_unless_hidden(client: openai.OpenAI) -> None:
    def prompt_tokens(**fields: Any) -> int:
        usage = ask(client, **fields).usage
        assert usage is not None
        return usage.prompt_tokens

    plain = prompt_tokens()
    assert prompt_tokens(tools=[TOOL]) > plain
    assert prompt_tokens(tools=[TOOL], tool_choice="none") == plain


def test_an_earlier_answer_and_a_tools_result_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = ask(client).choices[0].message
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        *MESSAGES,
        answer.model_dump(),
        {"role": "user", "content": "And with the tool?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    assert ask(client, messages, tools=[TOOL]).choices[0].message.content is not None


def test_fields_without_a_meaning_here_are_accepted(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    assert ask(client, **fields).choices[0].message.content == ask(client).choices[0].message.content


def test_the_last_message_can_be_continued(client: openai.OpenAI) -> None:
    whole = ask(client, extra_body={}).choices[0].message.content or ""
    begun = [*MESSAGES, {"role": "assistant", "content": whole[:4]}]
    rest = ask(client, begun, extra_body={"continue_final_message": True})
    assert whole[:4] + (rest.choices[0].message.content or "") == whole
    echoed = ask(client, begun, extra_body={"continue_final_message": True, "echo": True})
    assert echoed.choices[0].message.content == whole
