"""`token_trie`: converts a model's vocabulary to llguidance's form. Used by `Matchers` and benchmarks."""

from collections.abc import Sequence

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.text.tokenizer import Tokenizer


class _Tokens:
    """The bytes of each id. Grammars that force no tokens never need the tokens of a text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        return []


def token_trie(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Convert the vocabulary of a model with `vocab_size` logits. Without an EOS token, one id is added.

    Ids beyond the tokenizer's, and tokens without text, are never allowed. Takes about a second for 150k tokens.
    """
    special = {token_id for token_id in tokenizer.special_ids if token_id < vocab_size}
    special.update(token_id for token_id in eos_token_ids if token_id < vocab_size)
    tokens = [
        (tokenizer.token(token_id) or "").encode() if token_id in special else tokenizer.token_bytes(token_id)
        for token_id in range(vocab_size)
    ]
    ends = [token_id for token_id in eos_token_ids if token_id < vocab_size and tokens[token_id]]
    if not ends:
        ends = [vocab_size]
        tokens.append(b"<|no end of sequence|>")
        special.add(vocab_size)
    wrapper = TokenizerWrapper(_Tokens(tokens, sorted(special), ends[0]))
    return LLTokenizer(wrapper, eos_token=ends)


# Limits of a grammar's cost, for the checking process and the engine core.

PARSER_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""The library's defaults where they bound a step to about 20 ms. The numbers of lexer states (2 kB each) and symbols
are lower, which bounds the memory of one sequence to about 50 MB."""

CHECK_CPU_SECONDS = 0.4
CHECK_MEMORY_BYTES = 2**30
CHECK_STACK_BYTES = 2**20
"""Limits of a check. Its stack is far smaller than the engine core's, so that a grammar that passes the check cannot
overflow the core's."""
