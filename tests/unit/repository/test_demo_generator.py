"""The demo model's generator is reproducible, excludes held-out examples, and writes valid JSON and tool calls."""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from tools.demo.examples import Check, Document, Example, Message, chat_template, is_held_out, render, render_prompt
from tools.demo.generate import Text, as_text, held_out_texts, long_training_chats, training_texts

TRAINING = list(itertools.islice(training_texts(seed=0), 4000))
HELD_OUT = held_out_texts(seed=0, each=20)
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


def all_texts() -> list[Text]:
    return [*TRAINING, *itertools.chain.from_iterable(HELD_OUT.values())]


def rendered(messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    return chat_template().render(messages=messages, tools=tools, add_generation_prompt=True)


def test_the_same_seed_gives_the_same_texts() -> None:
    assert list(itertools.islice(training_texts(seed=0), 500)) == TRAINING[:500]
    assert held_out_texts(seed=0, each=20) == HELD_OUT


def test_another_seed_gives_other_texts() -> None:
    assert list(itertools.islice(training_texts(seed=1), 100)) != TRAINING[:100]


def test_no_held_out_key_is_ever_taught() -> None:
    held_out = {key for texts in HELD_OUT.values() for text in texts for key in text.keys if is_held_out((key,))}
    taught = {key for text in TRAINING for key in text.keys}
    assert held_out
    assert not held_out & taught


def test_a_held_out_sum_appears_in_no_training_text_of_any_shape() -> None:
    sums = re.compile(r"\b(\d+) ?([+-]) ?(\d+) =")
    for text in TRAINING:
        for a, operator, b in sums.findall(as_text(text)):
            if max(int(a), int(b)) >= 10:
                low, high = sorted((int(a), int(b)))
                assert not is_held_out((f"sum:{low}+{high}" if operator == "+" else f"sum:{a}-{b}",))


def test_every_sum_taught_is_right() -> None:
    sums = re.compile(r"(\d+) ([+-]) (\d+) = (-?\d+)")
    found = [match for text in all_texts() for match in sums.findall(as_text(text))]
    assert len(found) > 1000
    for a, operator, b, result in found:
        assert int(result) == (int(a) + int(b) if operator == "+" else int(a) - int(b))


def test_every_json_answer_parses_and_copies_its_values_from_the_prompt() -> None:
    examples = [text for text in all_texts() if text.category == "JSON"]
    assert examples
    for example in examples:
        value = json.loads(example.answer)
        assert isinstance(value, dict | list)
        if isinstance(value, dict) and example.keys[0].startswith("json:"):
            prompt = render_prompt(example)
            for key, found in value.items():
                assert key in prompt
                assert str(found) in prompt


def test_every_tool_call_names_an_offered_tool_and_its_parameters() -> None:
    examples = [text for text in all_texts() if text.check is Check.TOOL_CALL]
    assert examples
    for example in examples:
        body = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", example.answer)
        assert body is not None
        call = json.loads(body[1])
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
        assert call["arguments"].keys() == offered[call["name"]]["properties"].keys()


def test_documents_end_in_something_to_learn() -> None:
    documents = [text for text in TRAINING if isinstance(text, Document)]
    assert documents
    assert all(document.pieces[-1][1] for document in documents)


def test_long_chats_hold_several_turns_and_nothing_held_out() -> None:
    chat = next(long_training_chats(seed=0))
    assert isinstance(chat, Example)
    assert sum(message.role == "assistant" for message in chat.messages) > 8


def test_an_answer_is_what_follows_the_prompt() -> None:
    example = Example("talk", (), (Message("user", "Hi"), Message("assistant", "Hello!")))
    assert example.answer == "Hello!"
    assert render(example) == f"{render_prompt(example)}Hello!<|im_end|>\n"


def test_template_renders_each_role() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]},
    ]
    assert rendered(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nWhat now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_puts_tools_after_the_system_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert rendered(messages, [WEATHER]) == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", "parameters": {}}}\n</tools>\n'
        'To call one, answer <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'], ids=["dict", "JSON string"])
def test_template_renders_tool_calls_and_groups_their_results(arguments: object) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_1", "content": "cloudy"},
    ]
    rendered_call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert rendered(messages) == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{rendered_call}\n{rendered_call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\ncloudy\n</tool_response><|"
        "im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_renders_null_content_as_nothing() -> None:
    assert rendered([{"role": "user", "content": None}]).startswith("<|im_start|>user\n<|im_end|>\n")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "wizard", "content": "Hi"}, "Unknown role wizard"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "text only"),
    ],
)
def test_template_refuses_what_it_cannot_render(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        rendered([message])
