"""`IncrementalDetokenizer`: the text of one sequence, token by token, until a stop string.

Called by `RequestState`, once for each sequence and engine step.
"""

from collections.abc import Sequence

from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text deltas of one sequence.

    The concatenation of the deltas does not depend on how the tokens are grouped into pushes. Text is held back only
    while it could be the beginning of a stop string. The stop string that is completed first ends the text; of several
    that are completed by the same character, the longest. One that the first `min_tokens` tokens complete is ignored.
    """

    __slots__ = (
        "_exempt",
        "_held",
        "_include_stop",
        "_markers",
        "_min_tokens",
        "_openings",
        "_stops",
        "_stream",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        visible_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """After a prompt with text, the first word of the completion keeps its leading space.

        `visible_token_ids` are shown even if they are special and the parameters skip special tokens. Stop strings are
        not searched in them: they are for a parser, and the client does not see them.
        """
        at_start = all(token_id in tokenizer.special_ids for token_id in prompt_token_ids)
        self._stream = tokenizer.stream(params.skip_special_tokens, at_start, visible_token_ids)
        self._markers = visible_token_ids if params.skip_special_tokens else frozenset[int]()
        self._stops = params.stop_strings or ()
        self._openings = frozenset(stop[0] for stop in self._stops)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""
        self._exempt = 0
        """Number of leading characters of `_held` that belong to the first `min_tokens` tokens."""
        self.num_tokens = 0
        """Number of tokens of the text so far, without those after a stop string."""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def push(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Return the text that `token_ids` add, possibly empty. `finished` also releases the text that is held
        back."""
        if not self._stops:
            self.num_tokens += len(token_ids)
            return self._stream.step(token_ids, finished)
        shown = ""
        for token_id in token_ids:
            if self.stopped is not None:
                return shown
            self.num_tokens += 1
            if token_id in self._markers:
                shown += self._held + self._stream.step((token_id,))
                self._held, self._exempt = "", 0
            else:
                shown += self._advance(self._stream.step((token_id,)))
        if finished and self.stopped is None:
            shown += self._advance(self._stream.step((), final=True)) + self._held
            self._held = ""
        return shown

    def _advance(self, new: str) -> str:
        """Add the text of one token; returns the text that can be shown."""
        if not self._held and self._openings.isdisjoint(new):
            return new
        text = self._held + new
        if self.num_tokens <= self._min_tokens:
            self._exempt = len(text)
        else:
            begin, end = self._find_stop(text)
            if end:
                self._held = ""
                self.stopped = text[begin:end]
                return text[: end if self._include_stop else begin]
        shown = self._shown_length(text)
        self._held = text[shown:]
        self._exempt = max(0, self._exempt - shown)
        return text[:shown]

    def _find_stop(self, text: str) -> tuple[int, int]:
        """Return begin and end of the stop string that is completed first in `text`; (0, 0) if there is none."""
        found = (0, 0)
        for stop in self._stops:
            begin = text.find(stop, max(0, self._exempt + 1 - len(stop)))
            end = begin + len(stop)
            if begin >= 0 and (not found[1] or (end, begin) < (found[1], found[0])):
                found = (begin, end)
        return found

    def _shown_length(self, text: str) -> int:
        """Return the length of `text` without its longest suffix that may be a prefix of a stop string."""
        shown = len(text)
        for stop in self._stops:
            begin = text.find(stop[0], max(0, len(text) + 1 - len(stop)), shown)
            while begin >= 0 and not stop.startswith(text[begin:]):
                begin = text.find(stop[0], begin + 1, shown)
            if begin >= 0:
                shown = begin
        return shown
