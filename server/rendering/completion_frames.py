"""`CompletionFrames`: chunks of a streamed completion, from prepared bytes. Hot: one call a streamed chunk."""

import msgspec

from server.sse import PreparedFrames, encode, ending


class CompletionFrames(PreparedFrames):
    """Chunks of `/v1/completions`."""

    object = "text_completion"
    plain = b',"logprobs":null,"finish_reason":null}'

    def delta(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Struct | None,
        finish_reason: str | None,
        members: bytes = b"",
    ) -> bytes:
        """The event of what choice `index` gained; `members` are further ones, each with a comma in front."""
        opening = self._open.get(index)
        if opening is None:
            opening = self._open[index] = self._head + b'{"index":%d,"text":' % index
        if logprobs is None and finish_reason is None and not members:
            return b"".join((opening, encode(text), self._plain_end))
        return b"".join((opening, encode(text), members, ending(logprobs, finish_reason), self._close))
