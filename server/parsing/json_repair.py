"""`JsonMender`: reads one JSON value of a model in pieces, repairs it, and passes on valid JSON.

Valid JSON is passed on unchanged. Errors with only one possible meaning are repaired: Python's constants, quotes and
escapes, raw control characters in strings, unknown escapes, trailing commas, bare keys, and apostrophes in a string
between single quotes that a letter or digit follows. The tool-call dialects use it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\"\\\x00-\x1f]*")}
"""Characters without a special meaning inside a string, by its quote."""
_WORD = re.compile(r"""[^\s,:"'\[\]{}()<>]*""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,100}\.?[0-9]{0,100}|\.[0-9]{1,100})(?:[eE][+-]?[0-9]{1,2})?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS = {"u": 4, "x": 2, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


def mend(text: str) -> str | None:
    """Return the JSON value in `text`, repaired; None if it is not one value."""
    mender = JsonMender()
    stripped = text.strip()
    at = mender.read(stripped, 0)
    mender.end()
    return mender.take() if mender.done and at == len(stripped) else None


class JsonMender:
    """Reads one value, beginning with its first character. Reads each character once. Depth is bounded by memory
    alone."""

    __slots__ = (
        "_digits",
        "_digits_of",
        "_held",
        "_is_key",
        "_out",
        "_quote",
        "_stack",
        "_state",
        "_word_pieces",
        "done",
        "failed",
    )

    def __init__(self) -> None:
        self.done = False
        """Whether the value is complete."""
        self.failed = False
        """Whether the next character is invalid."""
        self._out: list[str] = []
        self._held: list[str] = []
        """Text that is passed on only when the next value begins: a comma that may be trailing, a key, a colon."""
        self._word_pieces: list[str] = []
        self._stack: list[str] = []
        self._quote = '"'
        self._is_key = False
        self._digits: list[str] = []
        self._digits_of = ""
        self._state: Callable[[str, int], int] = self._value

    def read(self, text: str, at: int) -> int:
        """Read from `text[at]`. Returns the index after the value, the end of the text, or the index of an invalid
        character."""
        end = len(text)
        while at < end and not (self.done or self.failed):
            at = self._state(text, at)
        return at

    def end(self) -> None:
        """Note the end of the text, which also ends a bare word, and a string after its quote."""
        if self.done or self.failed:
            return
        if self._state == self._word:
            self._end_word()
        elif self._state == self._single_quote:
            self._end_string()

    def take(self) -> str:
        """Return the JSON that has become final since the last call."""
        if not self._out:
            return ""
        taken = "".join(self._out)
        self._out.clear()
        return taken

    def unread(self) -> str:
        """Return the original text that was read and not passed on."""
        if self._state == self._escape:
            return "".join((*self._held, "\\"))
        if self._state == self._hex:
            return "".join((*self._held, "\\", self._digits_of, *self._digits))
        if self._state == self._single_quote:
            return "".join((*self._held, '"'))
        return "".join((*self._held, *self._word_pieces))

    def closers(self) -> str:
        """Return the brackets that would close the value now; empty inside a string, a key or a word."""
        if self._state == self._after or (self._state in (self._key, self._value) and self._trailing_comma()):
            return self.brackets()
        return ""

    def brackets(self) -> str:
        """Return the text that completes an invalid value, so that the passed-on text is valid JSON."""
        return "".join(_CLOSING[opening] for opening in reversed(self._stack))

    # -- states: each reads one or more characters, or changes to another state ---------------------------------

    def _blank(self, text: str, at: int) -> int:
        match = _WHITESPACE.match(text, at)
        assert match is not None
        if match.end() > at:
            (self._held or self._out).append(text[at : match.end()])
        return match.end()

    def _value(self, text: str, at: int) -> int:
        at = self._blank(text, at)
        if at == len(text):
            return at
        character = text[at]
        if character in _CLOSING:
            self._release()
            self._out.append(character)
            self._stack.append(character)
            self._state = self._first
            return at + 1
        return self._scalar(character, at, is_key=False)

    def _first(self, text: str, at: int) -> int:
        at = self._blank(text, at)
        if at == len(text):
            return at
        if text[at] == _CLOSING[self._stack[-1]]:
            return self._close(at)
        self._state = self._key if self._stack[-1] == "{" else self._value
        return at

    def _key(self, text: str, at: int) -> int:
        at = self._blank(text, at)
        return at if at == len(text) else self._scalar(text[at], at, is_key=True)

    def _scalar(self, character: str, at: int, is_key: bool) -> int:
        if character in _PLAIN:
            if not is_key:
                self._release()
            self._is_key = is_key
            self._quote = character
            self._put('"')
            self._state = self._string
            return at + 1
        if self._trailing_comma() and character == _CLOSING[self._stack[-1]]:
            self._held.clear()
            return self._close(at)
        if _WORD.fullmatch(character):
            self._is_key = is_key
            self._state = self._word
        else:
            self.failed = True
        return at

    def _colon(self, text: str, at: int) -> int:
        at = self._blank(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            self.failed = True
            return at
        self._held.append(":")
        self._state = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = self._blank(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._held.append(",")
            self._state = self._key if self._stack[-1] == "{" else self._value
            return at + 1
        if text[at] == _CLOSING[self._stack[-1]]:
            return self._close(at)
        self.failed = True
        return at

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN[self._quote].match(text, at)
        assert match is not None
        if match.end() > at:
            self._put(text[at : match.end()])
            at = match.end()
            if at == len(text):
                return at
        character = text[at]
        if character == self._quote == "'":
            self._state = self._single_quote
        elif character == self._quote:
            self._end_string()
        elif character == "\\":
            self._state = self._escape
        else:
            self._put(json.dumps(character)[1:-1])
        return at + 1

    def _single_quote(self, text: str, at: int) -> int:
        """Read nothing: the next character says whether the quote was an apostrophe, as LFM2.5's template writes."""
        if text[at].isalnum():
            self._put("'")
            self._state = self._string
        else:
            self._end_string()
        return at

    def _escape(self, text: str, at: int) -> int:
        character = text[at]
        self._state = self._string
        if character in _ESCAPES:
            self._put("\\" + character)
            return at + 1
        if character in _HEX_DIGITS:
            self._digits_of = character
            self._digits = []
            self._state = self._hex
            return at + 1
        if character == "'":
            self._put("'")
            return at + 1
        self._put("\\\\")
        return at

    def _hex(self, text: str, at: int) -> int:
        wanted = _HEX_DIGITS[self._digits_of]
        if text[at] in _HEX:
            self._digits.append(text[at])
            if len(self._digits) < wanted:
                return at + 1
            digits = "".join(self._digits)
            code = int(digits, 16)
            if code < 0x110000:
                self._put("\\u" + digits if wanted == 4 else json.dumps(chr(code))[1:-1])
                self._state = self._string
                return at + 1
            self._digits.pop()
        self._put("".join(("\\\\", self._digits_of, *self._digits)))
        self._state = self._string
        return at

    def _word(self, text: str, at: int) -> int:
        match = _WORD.match(text, at)
        assert match is not None
        if match.end() > at:
            self._word_pieces.append(text[at : match.end()])
        if match.end() < len(text):
            self._end_word()
        return match.end()

    # -- steps --------------------------------------------------------------------------------------------------

    def _put(self, text: str) -> None:
        """Pass on a piece of a string, or hold it back if it is a key: its value may be missing."""
        (self._held if self._is_key else self._out).append(text)

    def _trailing_comma(self) -> bool:
        return self._held[:1] == [","] and not "".join(self._held[1:]).strip()

    def _release(self) -> None:
        if self._held:
            self._out += self._held
            self._held.clear()

    def _close(self, at: int) -> int:
        self._out.append(_CLOSING[self._stack.pop()])
        self._end_value()
        return at + 1

    def _end_string(self) -> None:
        self._put('"')
        self._end_scalar()

    def _end_scalar(self) -> None:
        if self._is_key:
            self._is_key = False
            self._state = self._colon
        else:
            self._end_value()

    def _end_value(self) -> None:
        if self._stack:
            self._state = self._after
        else:
            self.done = True

    def _end_word(self) -> None:
        word = "".join(self._word_pieces)
        mended = json.dumps(word) if self._is_key else _word_value(word)
        if mended is None:
            self.failed = True
            return
        self._word_pieces.clear()
        if not self._is_key:
            self._release()
        self._put(mended)
        self._end_scalar()


def _word_value(word: str) -> str | None:
    if _NUMBER.fullmatch(word):
        return word
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _LOOSE_NUMBER.fullmatch(word):
        return str(int(word)) if word.lstrip("+-").isdigit() else repr(float(word))
    return None


# Arguments that a dialect writes as bare text (GLM, Qwen3-Coder) get the type of the tool's schema.

_ANY = frozenset({"string", "number", "boolean", "null", "array", "object"})
_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_PYTHON_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_FURTHER_NAMES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "none": "null",
}
"""Names of types that clients send although JSON Schema does not know them."""
_KEYWORDS = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "pattern": "string",
    "minLength": "string",
    "maxLength": "string",
    "minimum": "number",
    "maximum": "number",
}
"""Keywords that imply a type if a schema names none."""
_SPELLINGS = {"true": "true", "1": "true", "yes": "true", "false": "false", "0": "false", "no": "false"}
_INTEGER = re.compile(r"-?[0-9]+")
_NUMBERS = frozenset({"integer", "number"})
_DEPTH = 8
"""Most nested references and unions that are resolved."""


def argument_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the tool's `schema` allows for argument `key`."""
    properties = schema.get("properties")
    return schema_types(properties.get(key) if isinstance(properties, dict) else None, schema)


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a value may have under `schema`, a part of `root`. `number` includes integers."""
    return _types(schema, root, {}, _DEPTH)


def typed_argument(text: str, types: frozenset[str]) -> str | None:
    """Return the JSON value of `text` if it has one of `types` other than string; None if it is a string.

    In a union with string, text that is JSON of another allowed type has that type: `null` is null, but `007` and
    `+1`, which are not JSON, are strings. Where no string is allowed, other spellings of a boolean or null are read,
    and no text is the empty list or object, or null.
    """
    if types == {"string"}:
        return None
    if "string" not in types and (value := _spelled(text.strip().lower(), types)) is not None:
        return value
    value = mend(text)
    if value is None:
        return None
    kind = _KINDS.get(value[0]) or ("integer" if _INTEGER.fullmatch(value) else "number")
    if "string" not in types:
        return value
    if kind == "string":
        return value if types == _ANY else None
    if kind in _NUMBERS and value != text:
        return None
    return value if kind in types or (kind == "integer" and "number" in types) else None


def _spelled(word: str, types: frozenset[str]) -> str | None:
    """Return the JSON value that `word` means under `types`, which have no string; None if it is not a special one."""
    if not word:
        return next((value for kind, value in _EMPTY.items() if kind in types), None)
    if word in ("null", "none") and "null" in types:
        return "null"
    is_number = word in ("0", "1") and not types.isdisjoint(_NUMBERS)
    return _SPELLINGS.get(word) if "boolean" in types and not is_number else None


_EMPTY = {"array": "[]", "object": "{}", "null": "null"}


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """The types that all keywords of `schema` allow; those of the first if the keywords exclude one another.

    `known` has the types of the schemas that were visited, by identity, so that the work is linear in the size of
    `root` although its parts may refer to one another many times.
    """
    if not isinstance(schema, dict) or depth == 0:
        return _ANY
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = _ANY

    def of(member: Any) -> frozenset[str]:
        return _types(member, root, known, depth - 1)

    limits: list[frozenset[str]] = []
    kind = schema.get("type")
    if isinstance(kind, str | list):
        names = [kind] if isinstance(kind, str) else kind
        limits.append(frozenset(_FURTHER_NAMES.get(name, name) for name in names if isinstance(name, str)))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        limits.append(frozenset(_PYTHON_KINDS.get(type(value), "null") for value in values))
    if isinstance(schema.get("$ref"), str):
        limits.append(of(resolved(schema["$ref"], root)))
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list) and schema[union]:
            limits.append(frozenset().union(*map(of, schema[union])))
    if isinstance(schema.get("allOf"), list):
        limits += map(of, schema["allOf"])
    allowed = limits[0] if limits else frozenset(kind for keyword, kind in _KEYWORDS.items() if keyword in schema)
    for limit in limits[1:]:
        allowed = _both(allowed, limit) or allowed
    known[id(schema)] = allowed or _ANY
    return known[id(schema)]


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The types in both sets, of which `number` includes integers."""
    both = one & other
    if "number" not in both and not (one.isdisjoint(_NUMBERS) or other.isdisjoint(_NUMBERS)):
        return both | {"integer"}
    return both


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema `root` that `reference`, `#/…`, names; None if there is none."""
    value: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value
