"""Asserts that a parser needs as much time for a text's last characters as for its first, on a machine of any
speed."""

import time
from collections.abc import Callable

from server.parsing.parser import AnswerParser

SEGMENTS = 16
MOST = 3.0
"""Limit of the ratio: a parser that reads its input again needs 25 times as long for the last quarter."""

ATTEMPTS = 5
"""Number of attempts: other work on the machine may delay one; a slow parser is slow in all."""

PIECE = 4
"""Characters per piece, like a model's tokens."""


def assert_linear(begin: Callable[[], AnswerParser], text: str) -> None:
    """Fail if parsing takes more than linear time; `begin` makes a parser, which reads all of the text."""
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    found: list[float] = []
    while len(found) < ATTEMPTS:
        found.append(_slowdown(begin(), pieces))
        if found[-1] < MOST:
            return
    raise AssertionError(f"the last characters take {', '.join(f'{each:.1f}' for each in found)} times the first's")


def _slowdown(parser: AnswerParser, pieces: list[str]) -> float:
    """Ratio of the times of the last and the first segments, and of the end and all segments.

    The fastest of four runs, in this thread's own processor time, so that garbage collections do not count.
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
