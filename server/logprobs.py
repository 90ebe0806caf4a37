"""Log probabilities in OpenAI's two forms, from the engine's token ids. Called by `server.generation`."""

import codecs
from collections.abc import Iterable

from engine.messages import TokenLogprobs
from engine.tokenizer import Tokenizer
from server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.protocol.completions import CompletionLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class CompletionLogprobsWriter:
    """Log probabilities of one completion, as it grows: `text_offset` counts on from call to call."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._offset = 0
        self._decode = _Utf8Decoder("replace").decode

    def write(self, positions: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens' log probabilities."""
        written = CompletionLogprobs([], [], [], [])
        for position in positions:
            token = self._name(position.token_id)
            logprob = max(position.logprob, _LOWEST)
            top = {self._name(id): max(value, _LOWEST) for id, value in _alternatives(position)}
            written.tokens.append(token)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append({**top, token: logprob})
            written.text_offset.append(self._offset)
            if position.token_id not in self._hidden:
                self._offset += len(self._decode(self._tokenizer.token_bytes(position.token_id)))
        return written

    def _name(self, token_id: int) -> str:
        """The token's text; one that is no whole characters is spelled by its bytes, so that names differ."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprobs(tokenizer: Tokenizer, positions: Iterable[TokenLogprobs]) -> ChatLogprobs:
    """Log probabilities of a chat answer's tokens."""
    return ChatLogprobs([_chat_token(tokenizer, position) for position in positions])


def _chat_token(tokenizer: Tokenizer, position: TokenLogprobs) -> TokenLogprob:
    top = [TopLogprob(*_spelled(tokenizer, id, logprob)) for id, logprob in _alternatives(position)]
    return TokenLogprob(*_spelled(tokenizer, position.token_id, position.logprob), top)


def _spelled(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    spelled = tokenizer.token_bytes(token_id)
    return spelled.decode(errors="replace"), max(logprob, _LOWEST), list(spelled)


def _alternatives(position: TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(position.top_ids, position.top_logprobs, strict=True)
