"""`MembersParser`: of the dialects whose calls spell each argument as a key and bare text between markers."""

import json
from abc import abstractmethod

from server.answers.feed import Markers, Waiting
from server.answers.tools.base import ToolCallParser
from server.answers.typed_arguments import argument_types


class MembersParser(ToolCallParser):
    """Reads a call's arguments one by one; the tool's schema says what type each is of."""

    members_end: str
    """The marker behind the last of them."""
    member_markers: tuple[str, ...]
    """Others that may stand where a text breaks off."""
    value_end: Markers
    trim = ""
    """One of these next to either end of a value is no part of it."""

    @abstractmethod
    def _read_key(self) -> Waiting[str | None]:
        """Read a key and what opens its value; None where they are not there."""

    def _read_arguments(self, name: str) -> Waiting[bool]:
        """Read the arguments of the call of that function up to their end; whether it came."""
        feed = self._feed
        schema = self._schemas.get(name, {})
        opening = "{"
        while True:
            feed.keep()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(self.members_end)):
                feed.forget()
                self._close_arguments()
                return True
            key = yield from self._read_key()
            if key is None:
                if not (yield from self._cut_off(self.members_end, *self.member_markers)):
                    self._close_arguments()
                    self._no_call()
                return False
            feed.forget()
            self._argue(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            if not (yield from self._stream_typed(argument_types(schema, key), self.value_end, self.trim)):
                return False
