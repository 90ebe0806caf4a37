"""Whether a parser takes no longer for a text's last characters than for its first, on a machine of any speed."""

import time
from collections.abc import Callable

from server.parsing.parser import AnswerParser

SEGMENTS = 16
MOST = 3.0
"""A parser that reads again what it has read takes 25 times as long for the last quarter as for the first segment."""

ATTEMPTS = 5
"""Other work on the machine may hold up the last quarter of one; a parser that is slow there is so in all."""

PIECE = 4
"""Characters that come at a time, as from a model that writes tokens."""


def assert_linear(begin: Callable[[], AnswerParser], text: str) -> None:
    """Fails where parsing takes more than a time in proportion to the text; `begin` makes a parser to read it all."""
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    found: list[float] = []
    while len(found) < ATTEMPTS:
        found.append(_slowdown(begin(), pieces))
        if found[-1] < MOST:
            return
    raise AssertionError(f"the last characters take {', '.join(f'{each:.1f}' for each in found)} times the first's")


def _slowdown(parser: AnswerParser, pieces: list[str]) -> float:
    """How many times the first segments' time the last ones take, or the end takes of all of theirs.

    The quickest of four, in this thread's own processor time: a collection of garbage is no segment's fault.
    """
    bounds = [len(pieces) * number // SEGMENTS for number in range(SEGMENTS + 1)]
    segments = [pieces[bounds[number] : bounds[number + 1]] for number in range(SEGMENTS)]
    seconds = []
    for segment in segments:
        started = time.thread_time()
        for piece in segment:
            parser.push(piece)
        seconds.append(time.thread_time() - started)
    started = time.thread_time()
    parser.finish()
    end = time.thread_time() - started
    return max(min(seconds[-4:]) / min(seconds[:4]), end / sum(seconds))
