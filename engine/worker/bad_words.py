"""`BadWords`: the token sequences that a request must never complete. Kept by slot in the sampling columns."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BadWords:
    """Sequences of tokens, each forbidden as a whole: its last token, where those before it were just generated."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._words = [np.array(word, dtype=np.int64) for word in words if len(word) > 1]
        self._before_last = np.array([word[-2] for word in self._words], dtype=np.int64)

    def completing(self, generated: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The tokens that would complete a sequence behind `generated`, which no prompt is part of."""
        if not len(generated) or not self._words:
            return self._always
        # Most sequences are ruled out by the one token before their last.
        begun = [self._words[i] for i in np.flatnonzero(self._before_last == generated[-1]).tolist()]
        completing = [int(word[-1]) for word in begun if _ends_with(generated, word[:-1])]
        return np.concatenate([self._always, np.array(completing, dtype=np.int64)])


def _ends_with(generated: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]) -> bool:
    return len(tokens) <= len(generated) and np.array_equal(generated[-len(tokens) :], tokens)
