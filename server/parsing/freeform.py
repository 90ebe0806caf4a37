"""`FreeformInput`: extracts the free text from the JSON arguments of a custom tool's call, incrementally."""

import json
import re

_BEGIN = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"', re.DOTALL)
"""Matches the text up to the first character of an object's first value, if that is a string."""
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|["\\/bfnrt])')
_LONGEST_ESCAPE = len("\\ud83d\\ude00")
_SURROGATES = re.compile("[\ud800-\udfff]")


class FreeformInput:
    """Reads the arguments of one call.

    Models write `{"input": "text"}`. The text of the first member is passed on as it is read, whatever its name.
    Arguments of another form are the input itself, unchanged, once they are complete.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._inside = False
        self._ended = False

    def push(self, fragment: str) -> str:
        """Return the text that the JSON fragment `fragment` adds."""
        if self._ended:
            return ""
        self._unread += fragment
        if not self._inside:
            match = _BEGIN.match(self._unread)
            if match is None:
                return ""
            self._inside = True
            self._unread = self._unread[match.end() :]
        return self._read()

    def finish(self) -> str:
        """Return the remaining text at the end of the arguments, which may be incomplete."""
        if self._inside or self._ended:
            return ""
        self._ended = True
        try:
            value = json.loads(self._unread)
        except (ValueError, RecursionError):
            return self._unread
        return "" if value == {} else self._unread

    def _read(self) -> str:
        """Decode the available text up to the string's end, or to an incomplete escape."""
        text, at = self._unread, 0
        decoded: list[str] = []
        while at < len(text):
            if match := _PLAIN.match(text, at):
                decoded.append(match[0])
                at = match.end()
            elif text[at] == '"':
                self._ended = True
                at = len(text)
            elif len(text) - at < _LONGEST_ESCAPE and _may_go_on(text[at:]):
                break
            elif match := _ESCAPE.match(text, at):
                decoded.append(_SURROGATES.sub("\ufffd", json.loads(f'"{match[0]}"')))
                at = match.end()
            else:
                decoded.append(text[at])
                at += 1
        self._unread = text[at:]
        return "".join(decoded)


_WHOLE_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89abAB])[0-9a-fA-F]{4})')


def _may_go_on(text: str) -> bool:
    """Return whether the escape at the beginning of `text` may be incomplete, as half of a surrogate pair is."""
    return _WHOLE_ESCAPE.match(text) is None and _ESCAPE_BEGINNING.fullmatch(text) is not None


_ESCAPE_BEGINNING = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]{0,1})?)?)?)?))?"
)
