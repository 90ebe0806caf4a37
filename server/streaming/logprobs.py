"""Converts the engine's log probabilities to OpenAI's forms for completions, chats and prompts."""

import codecs
import itertools
from collections.abc import Iterable, Sequence

from engine.messages import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from server.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.schemas.completions import CompletionLogprobs
from server.schemas.generation import PromptLogprobs, PromptTokenLogprob

_LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class CompletionLogprobsWriter:
    """Converts the log probabilities of one completion piece by piece. `text_offset` continues from call to call."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, as_ids: bool = False) -> None:
        """With `as_ids`, tokens are written as their ids."""
        self._tokenizer = tokenizer
        self._name = _by_id if as_ids else tokenizer.token_name
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._offset = 0
        self._at_start = False
        """Whether the next token is the first of the text, where some decoders drop a leading space."""
        self._decode = _Utf8Decoder("replace").decode

    def write_prompt(
        self, text: str, first: int, positions: Iterable[TokenLogprobs], count: int
    ) -> CompletionLogprobs:
        """Convert those of the echoed prompt `text`. The `first` token has none, the others have `count`
        alternatives."""
        written = CompletionLogprobs([self._name(first)], [None], [None], [0])
        self._at_start = True
        self._advance(first)
        for position in positions:
            self._add(written, position, count)
        self._at_start = False
        self._decode(b"", True)
        self.begin_after(text)
        return written

    def begin_after(self, text: str) -> None:
        """Begin after the echoed prompt `text`, whose log probabilities another writer converts."""
        self._offset = len(text)

    def write(self, positions: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """Convert the log probabilities of the next generated tokens."""
        written = CompletionLogprobs([], [], [], [])
        for position in positions:
            self._add(written, position, len(position.top_ids))
        return written

    def _add(self, written: CompletionLogprobs, position: TokenLogprobs, count: int) -> None:
        token = self._name(position.token_id)
        logprob = max(position.logprob, _LOWEST)
        top = dict(zip(map(self._name, position.top_ids[:count]), _finite(position.top_logprobs[:count]), strict=True))
        written.tokens.append(token)
        written.token_logprobs.append(logprob)
        top[token] = logprob
        written.top_logprobs.append(top)
        written.text_offset.append(self._offset)
        self._advance(position.token_id)

    def _advance(self, token_id: int) -> None:
        """Advance the offset by the characters of a token's text."""
        if token_id not in self._hidden:
            spelled = self._tokenizer.first_token_bytes if self._at_start else self._tokenizer.token_bytes
            self._offset += len(self._decode(spelled(token_id)))
            self._at_start = False


def prompt_logprobs(tokenizer: Tokenizer, positions: Iterable[TokenLogprobs], count: int) -> PromptLogprobs:
    """Convert a prompt's log probabilities, with `count` alternatives. `positions` has all tokens but the first."""
    return [None, *(_candidates(tokenizer, position, count) for position in positions)]


def _candidates(tokenizer: Tokenizer, position: TokenLogprobs, count: int) -> dict[int, PromptTokenLogprob]:
    own, text = position.token_id, tokenizer.token_text
    candidates = {own: PromptTokenLogprob(max(position.logprob, _LOWEST), position.rank, text(own))}
    ids, logprobs = position.top_ids[:count], _finite(position.top_logprobs[:count])
    candidates.update(zip(ids, map(PromptTokenLogprob, logprobs, itertools.count(1), map(text, ids)), strict=True))
    return candidates


def chat_logprobs(tokenizer: Tokenizer, positions: Iterable[TokenLogprobs], *, as_ids: bool = False) -> ChatLogprobs:
    """Convert the log probabilities of a chat answer's tokens. With `as_ids`, tokens are written as their ids."""
    return ChatLogprobs([_chat_token(tokenizer, position, as_ids) for position in positions])


def _chat_token(tokenizer: Tokenizer, position: TokenLogprobs, as_ids: bool) -> TokenLogprob:
    alternatives = zip(position.top_ids, _finite(position.top_logprobs), strict=True)
    top = [TopLogprob(*_spelled(tokenizer, id, logprob, as_ids)) for id, logprob in alternatives]
    return TokenLogprob(*_spelled(tokenizer, position.token_id, position.logprob, as_ids), top)


def _spelled(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> tuple[str, float, list[int]]:
    name = _by_id(token_id) if as_ids else tokenizer.token_text(token_id)
    return name, max(logprob, _LOWEST), list(tokenizer.token_bytes(token_id))


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprobs: Sequence[float]) -> Sequence[float]:
    """Replace minus infinity in log probabilities in descending order."""
    if logprobs and logprobs[-1] < _LOWEST:
        return [max(each, _LOWEST) for each in logprobs]
    return logprobs
