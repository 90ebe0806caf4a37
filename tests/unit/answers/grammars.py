"""llguidance over a vocabulary of single bytes and given special tokens: accepts and samples texts of the grammars."""

import random
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class ByteVocabulary:
    """256 bytes, then the special tokens, then the end-of-sequence token."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special = {text: 256 + place for place, text in enumerate(special)}
        self.eos_token_id = 256 + len(special)
        self.bos_token_id = None
        self.special_token_ids = [*self.special.values(), self.eos_token_id]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in special), b"<eos>"]
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))
        self._split = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; its special tokens become one id each."""
        ids, at = [], 0
        for match in self._split.finditer(text):
            ids += [*text[at : match.start()].encode(), self.special[match[0]]]
            at = match.end()
        return [*ids, *text[at:].encode()]

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[each] for each in ids).decode()

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether `grammar` accepts `text` as a whole answer."""
        matcher = self.matcher(grammar)
        ids = self.encode(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, grammar)
        assert not matcher.get_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def sample(self, grammar: str, seed: int, longest: int = 600) -> str | None:
        """Sample an answer of ASCII text under `grammar`; None if it did not end within `longest` tokens.

        Closing characters are more probable than others, so that texts end.
        """
        rng = random.Random(seed)
        matcher = self.matcher(grammar)
        ids: list[int] = []
        while len(ids) < longest:
            mask = matcher.compute_bitmask()
            allowed = [each for each in range(len(self.tokens)) if mask[each // 8] >> (each % 8) & 1]
            allowed = [each for each in allowed if each < 127 or each >= 256] or allowed
            if self.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.3):
                return self.text(ids)
            allowed = [each for each in allowed if each != self.eos_token_id]
            closing = [each for each in allowed if each >= 256 or chr(each) in '"}])</']
            token = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        return None
