"""`FillIn`: prompts that ask a model for what goes between a prefix and a suffix, where its tokenizer has marks.

Called by the input/output processor. Each family of code models has marks, and an order, of its own.
"""

from typing import NamedTuple

from engine.tokenizer import Tokenizer


class _Marks(NamedTuple):
    prefix: str
    suffix: str
    middle: str | None
    """None: the model goes on behind the prefix, which comes last."""
    ends: tuple[str, ...] = ()
    """Tokens that end what is filled in, besides the model's end-of-sequence tokens."""
    suffix_first: bool = False


_FAMILIES = (
    # Qwen-Coder, CodeGemma, and others that took their names.
    _Marks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder and Granite; SantaCoder.
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder, whose marks are written with fullwidth bars.
    _Marks("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    # CodeLlama.
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # Codestral, whose models see the suffix first.
    _Marks("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)


class FillIn:
    """Fill-in-the-middle prompts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, marks: _Marks) -> None:
        """Raises `KeyError` when the tokenizer lacks one of the marks."""
        self._tokenizer = tokenizer
        self._suffix_first = marks.suffix_first
        self._prefix, self._suffix = _id(tokenizer, marks.prefix), _id(tokenizer, marks.suffix)
        self._middle = [] if marks.middle is None else [_id(tokenizer, marks.middle)]
        ends = (tokenizer.token_id(end) for end in marks.ends)
        self.end_token_ids = [end for end in ends if end is not None]
        """Tokens at which to stop."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "FillIn | None":
        """For the marks that `tokenizer` has; None where it has none."""
        for marks in _FAMILIES:
            try:
                return cls(tokenizer, marks)
            except KeyError:
                continue
        return None

    def prompt(self, prefix: list[int], suffix: list[int], add_special_tokens: bool) -> list[int]:
        """The prompt that asks for what goes between; both come without what `add_special_tokens` puts around."""
        before, after = [self._prefix, *prefix], [self._suffix, *suffix]
        opening = self._tokenizer.encode("") if add_special_tokens else []
        ordered = [*after, *before] if self._suffix_first else [*before, *after]
        return [*opening, *ordered, *self._middle]


def _id(tokenizer: Tokenizer, mark: str) -> int:
    token_id = tokenizer.token_id(mark)
    if token_id is None:
        raise KeyError(mark)
    return token_id
