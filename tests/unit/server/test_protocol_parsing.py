"""Bytes become a request: bodies that are no JSON, no object, or too large are refused in a sentence."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.errors import BadRequest, BodyTooLarge
from server.request_builder import read_body
from server.schemas.batches import MessageBatchRequest
from server.schemas.body import RequestModel, parse_object, validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.operations import UnloadAdapterRequest
from server.schemas.responses import ResponsesRequest
from server.schemas.tokenize import DetokenizeRequest


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"prompt": "\xff"}', "byte 12 is 0xff"),
        (b'{"temperature": NaN}', "holds NaN"),
        (b'{"temperature": -Infinity}', "holds -Infinity"),
        (b'{"temperature": 1e999}', "beyond what fits"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[" * 50_000, "nested too deeply"),
        (b"[1, 2]", "is a list; it must be a JSON object"),
        (b"3", "is 3; it must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
        (b"null", "is null; it must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_its_reason(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match="the request body") as caught:
        parse_object(body)
    assert says in str(caught.value)


@pytest.mark.parametrize("item", ["[]", "{}", '{"a": {}}', r'"\\\"[", []'])
def test_a_body_of_very_many_lists_and_objects_is_refused_before_they_are_made(item: str) -> None:
    body = '{"x": [' + ",".join([item] * 140_000) + "]}"
    with pytest.raises(BadRequest, match=r"body holds more than 65536 lists and objects; send fewer$"):
        parse_object(body.encode())


def refused_values(item: str, number: int, max_bytes: int = 2**22) -> str:
    with pytest.raises(BadRequest, match=r"body holds more than \d+ values") as caught:
        parse_object(b'{"x": [' + b",".join([item.encode()] * number) + b"]}", max_bytes)
    return str(caught.value)


@pytest.mark.parametrize("item", ["1", "2.2250738585072011e-308", '""', r'"\\\"[{,"', "null"])
def test_a_body_of_very_many_values_is_refused_before_they_are_made(item: str) -> None:
    assert "more than 262144 values; send fewer" in refused_values(item, 262_145)
    assert len(parse_object(b'{"x": [' + b",".join([item.encode()] * 262_000) + b"]}")["x"]) == 262_000


def test_a_larger_limit_of_bytes_admits_more_values() -> None:
    assert len(parse_object(b'{"x": [' + b",".join([b"1"] * 262_145) + b"]}", 2**23)["x"]) == 262_145
    assert "more than 524288 values" in refused_values("1", 524_289, 2**23)


def test_a_body_of_very_many_fields_is_refused_before_they_are_made() -> None:
    def fields(number: int) -> bytes:
        return b"{" + b",".join(b'"%d:":1' % each for each in range(number)) + b"}"

    with pytest.raises(BadRequest, match="holds more than 65536 fields; send fewer"):
        parse_object(fields(65_537))
    assert len(parse_object(fields(65_536))) == 65_536


@pytest.mark.parametrize("text", ["[{,:", r"\"[{,:", r"\\[,:", r"\\\"[{,:", "\\\\" * 40_000 + ","])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_what_is_in_a_string_is_no_value_wherever_the_count_is_cut(text: str, shift: int) -> None:
    text = "x" * shift + text * (600_000 // len(text))
    assert parse_object(f'{{"prompt": "{text}", "x": [[], "{text}"]}}'.encode())["x"][0] == []


@pytest.mark.parametrize("number", ["2.2250738585072011e-308", "1e308", "-0.0", "4.9e-324", "0.1", "1e-999"])
def test_numbers_are_read_as_python_reads_them(number: str) -> None:
    assert repr(parse_object(b'{"x": %b}' % number.encode())["x"]) == repr(float(number))


def test_a_large_body_that_is_no_json_is_refused_with_the_position() -> None:
    with pytest.raises(BadRequest, match=r"is not valid JSON, .*\(byte 100007\)"):
        parse_object(b'{"x": [' + b" " * 100_000 + b", 1]}")


@pytest.mark.parametrize("text", ["[{", r"\"[{", r"\\[", r"\\\"[{"])
def test_brackets_in_strings_are_no_lists_or_objects(text: str) -> None:
    assert len(parse_object(f'{{"prompt": "{text * 140_000}", "x": [[], "{text}"]}}'.encode())["x"]) == 2


def test_whole_surrogate_pairs_and_any_other_unicode_are_accepted() -> None:
    assert parse_object(b'{"prompt": "\\ud83d\\ude00 \xe6\xbc\xa2"}') == {"prompt": "😀 漢"}


class _Request:
    """The part of a request that `read_body` uses; it counts the chunks that are read."""

    def __init__(self, chunks: list[bytes], headers: dict[str, str]) -> None:
        self.headers = headers
        self.chunks = chunks
        self.read = 0

    async def stream(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.read += 1
            yield chunk


async def test_a_body_up_to_the_limit_is_read_whole() -> None:
    request = _Request([b"12345", b"67890"], {"content-length": "10"})
    assert await read_body(request, 10) == b"1234567890"  # type: ignore[arg-type]


async def test_a_declared_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    request = _Request([b"x" * 11], {"content-length": "11"})
    with pytest.raises(BodyTooLarge, match="has 11 bytes; this server takes at most 10 bytes"):
        await read_body(request, 10)  # type: ignore[arg-type]
    assert request.read == 0


async def test_a_chunked_body_is_read_no_further_than_the_limit() -> None:
    request = _Request([b"123456"] * 1000, {})
    with pytest.raises(BodyTooLarge, match="max_request_bytes"):
        await read_body(request, 10)  # type: ignore[arg-type]
    assert request.read == 2


def test_arguments_of_calls_hold_few_lists_and_objects_together() -> None:
    """They are JSON in the strings of a body, and become objects for the chat template."""

    def chat(*arguments: str) -> ChatCompletionRequest:
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
        messages = [{"role": "assistant", "tool_calls": [call]} for call in calls]
        return validate({"model": "m", "messages": messages}, ChatCompletionRequest, allow_unknown=False)

    many = json.dumps({"a": [[]] * 1000})
    with pytest.raises(BadRequest, match=r"messages' tool_calls holds more than 65536 lists and objects; send fewer$"):
        chat('{"an unpaired quote: ', *[many] * 100)
    assert len(chat(*[many] * 50).messages) == 50
    assert len(chat(*[json.dumps({"a": "[" * 1000})] * 100).messages) == 100


def test_a_name_with_a_line_break_is_refused_in_a_sentence() -> None:
    with pytest.raises(BadRequest, match=r"^lora_name has a line break or another character that cannot be shown; "):
        validate({"lora_name": "a\nb"}, UnloadAdapterRequest, allow_unknown=False)


@pytest.mark.parametrize(
    ("model", "fields", "sentence"),
    [
        (DetokenizeRequest, {"tokens": [-5]}, "tokens[0] is -5; it must be at least 0"),
        (ResponsesRequest, {"tools": [1]}, "tools[0] is 1; it must be an object"),
        (ResponsesRequest, {"text": {"format": "x"}}, 'text.format is "x"; it must be an object'),
        (
            MessageBatchRequest,
            {"requests": [{"custom_id": "", "params": {}}]},
            'requests[0].custom_id is ""; it must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -',
        ),
        (UnloadAdapterRequest, {"lora_name": "a" * 257}, "…; it may have at most 256 characters, and has 257"),
    ],
)
def test_no_refusal_has_the_words_of_the_library(
    model: type[RequestModel], fields: dict[str, Any], sentence: str
) -> None:
    given = {"model": "m", "input": "a", **fields} if model is ResponsesRequest else fields
    with pytest.raises(BadRequest) as caught:
        validate(given, model, allow_unknown=False)
    assert str(caught.value).endswith(sentence)
