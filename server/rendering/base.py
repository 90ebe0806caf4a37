"""`Renderer`: what `server.generation` needs of an endpoint's answer."""

import time
import uuid
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.request_state import RequestDelta, RequestState
from server.errors import ApiError
from server.protocol.common import AnswerHead, Usage
from server.sse import error_event


class Renderer(Protocol):
    """One request's answer in its endpoint's form. Choices are known by their index."""

    head: AnswerHead

    def opening(self) -> bytes:
        """Events before the first token."""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        """Events for what choice `index` gained."""

    def closing(self, usage: Usage) -> bytes:
        """Events behind the last choice's end, the stream's own end included."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that `error` ends."""
        return error_event(error.body())

    def whole(self, states: Sequence[RequestState], usage: Usage) -> msgspec.Struct:
        """The answer at once, a choice a state."""


def answer_head(prefix: str, model: str, fingerprint: str) -> AnswerHead:
    """A new answer's head; its id begins with `prefix`."""
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)
