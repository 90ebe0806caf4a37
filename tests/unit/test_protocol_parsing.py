"""From bytes to a request: what is not JSON, not an object or too large is refused in a sentence."""

from collections.abc import AsyncIterator

import pytest

from server.errors import BadRequest, BodyTooLarge
from server.request_builder import read_body
from server.schemas.body import parse_object


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
        (b"[" * 100_000, "nested too deeply"),
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
    with pytest.raises(BadRequest, match=r"body holds \d+ lists and objects; it may hold at most 131072$"):
        parse_object(body.encode())


@pytest.mark.parametrize("text", ["[{", r"\"[{", r"\\[", r"\\\"[{"])
def test_brackets_in_strings_are_no_lists_or_objects(text: str) -> None:
    assert len(parse_object(f'{{"prompt": "{text * 140_000}", "x": [[], "{text}"]}}'.encode())["x"]) == 2


def test_whole_surrogate_pairs_and_any_other_unicode_are_accepted() -> None:
    assert parse_object(b'{"prompt": "\\ud83d\\ude00 \xe6\xbc\xa2"}') == {"prompt": "😀 漢"}


class _Request:
    """As much of a request as `read_body` uses; counts the chunks that are read."""

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
