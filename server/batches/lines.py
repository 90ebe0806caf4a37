"""The lines of a batch's files: requests, which are read and checked, and answers, which are encoded and counted."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from server.errors import BadRequest
from server.schemas.batches import BatchError, BatchUsage
from server.schemas.body import parse_object

MAX_LINES = 50_000
"""Most requests in a batch (OpenAI's limit)."""

MAX_LINE_BYTES = 33 * 2**20
"""Longest line in bytes where no server sets the largest body: the largest default body, and the members around it."""

AROUND_BODY_BYTES = 2**16
"""Most bytes of a line around its body."""

_MAX_ERRORS = 100
"""Most invalid lines that a failed batch reports."""
_MAX_CUSTOM_ID = 512

_PRIORITY = 100
"""Priority of lines: the lowest priority that a request may have."""

_WORK_SECONDS, _REST_PARTS, _MOST_REST_SECONDS = 0.001, 3.0, 0.05
"""Seconds of work on lines until a rest; length of the rest as a multiple of the work; most seconds of a rest."""

_PRIORITISED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
)
"""Endpoints whose requests have the field `priority`."""


class Line(NamedTuple):
    """The position of a request in the input of a batch."""

    number: int
    """Number of the request, from 0."""
    custom_id: str
    start: int
    length: int
    """Offset of its line in the file, and the length of the line, in bytes."""


# -- requests -----------------------------------------------------------------------------------------------------


def read_lines(
    path: Path, endpoint: str, rest: Callable[[], object] = lambda: None, max_bytes: int = MAX_LINE_BYTES
) -> tuple[list[Line], list[BatchError]]:
    """Return the requests in a batch's input, and the errors of invalid lines. Empty lines are skipped.

    A line may have at most `max_bytes`. `rest` is called after each line.
    """
    lines: list[Line] = []
    errors: list[BatchError] = []
    seen: set[str] = set()
    start = 0
    with path.open("rb") as file:
        for number in itertools.count(1):
            content = file.readline(max_bytes + 1)
            if not content:
                break
            if len(content) > max_bytes:
                why = f"the line is longer than {max_bytes} bytes, the most that a line may have (max_request_bytes)"
                return [], [*errors, BatchError("line_too_long", why, line=number)]
            if content.strip():
                checked = _checked(content, endpoint, seen, max_bytes)
                if isinstance(checked, BatchError):
                    checked.line = number
                    errors.append(checked)
                else:
                    seen.add(checked)
                    lines.append(Line(len(lines), checked, start, len(content)))
                if len(lines) > MAX_LINES:
                    why = f"the input has more than {MAX_LINES} lines, the most that a batch may have"
                    return [], [BatchError("too_many_tasks", why)]
                if len(errors) == _MAX_ERRORS:
                    return [], errors
            start += len(content)
            rest()
    if not lines and not errors:
        errors.append(BatchError("empty_file", "the input holds no request; write one JSON object per line"))
    return lines, errors


def _checked(content: bytes, endpoint: str, seen: set[str], max_bytes: int) -> str | BatchError:
    """Return the custom id of a line, or its error."""
    try:
        line = parse_object(content, max_bytes)
    except BadRequest as error:
        return BatchError("invalid_json_line", str(error).replace("the request body", "the line"))
    for field, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(line.get(field), kind):
            noun = "an object" if kind is dict else "a string"
            return BatchError("missing_required_parameter", f"{field} is missing, or is not {noun}", param=field)
    custom_id: str = line["custom_id"]
    if not 1 <= len(custom_id) <= _MAX_CUSTOM_ID:
        sentence = f"custom_id has {len(custom_id)} characters; it must have between 1 and {_MAX_CUSTOM_ID}"
        return BatchError("invalid_custom_id", sentence, param="custom_id")
    if custom_id in seen:
        sentence = f"custom_id is {custom_id[:60]!r}, as in an earlier line; each line needs its own"
        return BatchError("duplicate_custom_id", sentence, param="custom_id")
    if line["method"] != "POST":
        return BatchError("invalid_method", f"method is {line['method'][:60]!r}; it must be POST", param="method")
    if line["url"] != endpoint:
        return BatchError("mismatched_url", f"url is {line['url'][:60]!r}; the batch's is {endpoint}", param="url")
    for field in ("stream", "background"):
        if line["body"].get(field):
            return BatchError(
                "invalid_request", f"body.{field} is set; a batch has whole answers", param=f"body.{field}"
            )
    return custom_id


class Pace:
    """Leaves the interpreter lock to other threads for three quarters of the time.

    A computing thread takes the lock each time that the event loop waits or sends. The loop then needs 0.5 ms to get
    it back, dozens of times per round.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()

    def rest(self) -> None:
        """Sleep, if the work since the last rest took more than a millisecond."""
        worked = time.monotonic() - self._began
        if worked > _WORK_SECONDS:
            time.sleep(min(_REST_PARTS * worked, _MOST_REST_SECONDS))
            self._began = time.monotonic()


class _Requested(msgspec.Struct):
    body: msgspec.Raw


def request_body(content: bytes, endpoint: str) -> bytes:
    """Return the body of a line's request, with low priority."""
    body = bytes(msgspec.json.decode(content, type=_Requested).body)
    if endpoint not in _PRIORITISED:
        return body
    # If a field is present twice, the last one counts. Decoding a large body here would delay other requests.
    fields = body.strip()[1:-1].rstrip()
    return b'{%b%b"priority":%d}' % (fields, b"," if fields else b"", _PRIORITY)


# -- answers ------------------------------------------------------------------------------------------------------


def output_line(
    custom_id: str, response: Mapping[str, Any] | None = None, error: Mapping[str, str] | None = None
) -> bytes:
    """Encode a line of a batch's output, without the line break."""
    line = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)


# These structs decode the token counts of an output line, in the forms of all endpoints.


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    thinking_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class _OutputLine(msgspec.Struct):
    response: _Response | None = None


_decode_output = msgspec.json.Decoder(_OutputLine).decode


class AnswerTotals:
    """Adds up the tokens of answers, and finds their model."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.usage = BatchUsage()

    def add(self, answer: bytes) -> None:
        try:
            response = _decode_output(answer).response
        except (msgspec.DecodeError, RecursionError):
            return  # The answer reports no token counts in a known form.
        body = (response and response.body) or _Body()
        self.model = self.model or body.model
        part, total = body.usage or _Usage(), self.usage
        given = (part.prompt_tokens_details or part.input_tokens_details) or _Details()
        written = (part.completion_tokens_details or part.output_tokens_details) or _Details()
        cached = given.cached_tokens + part.cache_read_input_tokens
        total.input_tokens += (
            part.prompt_tokens + part.input_tokens + part.cache_creation_input_tokens + part.cache_read_input_tokens
        )
        total.output_tokens += part.completion_tokens + part.output_tokens
        total.input_tokens_details.cached_tokens += cached
        total.output_tokens_details.reasoning_tokens += written.reasoning_tokens + written.thinking_tokens
        total.total_tokens = total.input_tokens + total.output_tokens
