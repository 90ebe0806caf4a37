"""`GrammarSpec`: the form of the answer that a request sets. `InvalidGrammar`: the error of an invalid form.

The server creates it from `response_format` and `structured_outputs`; `lark_of` converts it to a grammar's text.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar"]

MAX_NESTING = 64
"""Most levels of a schema: the library supports about 80, and Python's stack a few hundred."""

MAX_CHOICES = 4096

_WHITESPACE = r"[ ]|\n {0,20}"
"""White space between two JSON tokens: none, a space, or a line break and indentation. It is bounded, because a model
that writes indentation without end would never answer."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)
_IN_LARK = {"/": "\\/", "\n": "\\n", "\\\n": "\\n", "\\d": "[0-9]", "\\D": "[^0-9]"}
r"""Replacements in a regular expression for Lark. Digits are ASCII digits, not the 700 of Unicode. A class within a
class is their union."""


HALF_SURROGATE = "it holds half a surrogate pair, which is not a character"
_NOT_FINITE = "it holds a number that is not finite"


class InvalidGrammar(ValueError):
    """A grammar is invalid, unsupported or too costly. The message is a sentence whose subject is the grammar."""


class CheckUnavailable(RuntimeError):
    """A grammar cannot be checked now. It may be valid."""

    def __init__(self, message: str, retry_seconds: int = 1) -> None:
        """`retry_seconds` is the time after which a check may be tried again."""
        super().__init__(message)
        self.retry_seconds = retry_seconds


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The form of an answer. `value` depends on `kind`:

    json: a JSON schema, as an object or as text. json_object: nothing, any object will do. regex: a pattern for the
    whole answer. choice: strings, one of which is the answer. grammar: EBNF, in the syntax of Lark or GBNF.
    """

    kind: GrammarKind
    value: Any = None


def lark_of(spec: GrammarSpec) -> str:
    """Convert to Lark for llguidance, whose first rule is `start`. GBNF is returned unchanged, for the checker.

    Raises `InvalidGrammar` for errors that are visible without compiling.
    """
    match spec.kind:
        case "json":
            return f"start: %json {_schema_text(spec.value)}\n"
        case "json_object":
            return f"start: %json {_schema_text({'type': 'object'})}\n"
        case "regex":
            return f"start: /{_regex_body(_text(spec.value))}/\n"
        case "choice":
            return f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, _choices(spec.value)))}\n"
        case "grammar":
            return _text(spec.value)


def without_forcing(grammar: str) -> str:
    """Change `grammar`, Lark or several in a JSON object, so that it forces no tokens and constrains only bytes: to
    force tokens, the library would need the tokens of a text, which not every tokenizer can provide."""
    if not grammar.lstrip().startswith("{"):
        return f"{grammar}\n{_NO_FORCING}"
    grammars = json.loads(grammar)["grammars"]
    return json.dumps(
        {"grammars": [{**each, "lark_grammar": without_forcing(each["lark_grammar"])} for each in grammars]}
    )


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema, parse_float=_finite, parse_constant=_finite)
        except RecursionError:
            _too_deep()
        except InvalidGrammar:
            raise
        except ValueError as error:
            raise InvalidGrammar(f"it is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidGrammar("it is no JSON schema; a schema is a JSON object")
    if is_deeper(schema, MAX_NESTING):
        _too_deep()
    return encoded_schema({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def encoded_schema(schema: dict[str, Any]) -> str:
    """Encode a JSON schema. Raises `InvalidGrammar`."""
    try:
        # Python's encoder holds the interpreter's lock ten times as long.
        encoded = msgspec.json.encode(schema)
    except UnicodeEncodeError as error:
        raise InvalidGrammar(HALF_SURROGATE) from error
    except OverflowError as error:
        raise InvalidGrammar("it holds an integer that does not fit 64 bits") from error
    if b"null" in encoded:
        # The encoder writes null for NaN and infinities, which callers of the Python API may pass.
        _check_numbers(schema)
    return encoded.decode()


def _check_numbers(value: Any) -> None:
    """Refuse numbers that are not finite."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidGrammar(_NOT_FINITE)
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_numbers(each)


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise InvalidGrammar(_NOT_FINITE)
    return number


def is_deeper(value: Any, most: int) -> bool:
    """Return whether a JSON value has more than `most` levels of objects and lists. Deeper levels are not examined."""
    level, depth = [value], 0
    while level and depth <= most:
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
        depth += bool(nested)
    return depth > most


def _too_deep() -> NoReturn:
    raise InvalidGrammar(f"it is nested too deeply; it may have at most {MAX_NESTING} levels")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidGrammar("it is empty; it must be a string with at least 1 character")
    return value


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidGrammar("it must be a list of strings, each with at least 1 character")
    if len(value) > MAX_CHOICES:
        raise InvalidGrammar(f"it holds {len(value)} choices; it may hold at most {MAX_CHOICES}")
    return list(dict.fromkeys(value))


def _regex_body(regex: str) -> str:
    """Convert `regex` to the text between the slashes of a Lark regular expression."""
    return _ESCAPED.sub(lambda match: _IN_LARK.get(match[0], match[0]), regex)


def _literal(text: str) -> str:
    """Return a Lark string that matches `text`, which may have a megabyte in all choices of a request."""
    return f'"{text.translate(_IN_STRING)}"'


_IN_STRING = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord(each): f"\\{each}" for each in '"\\'}


# The library's error messages as sentences for the client.

_MAX_CHARACTERS = 300
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")
_LAST_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_KEYWORDS = re.compile(r"^Unimplemented keys: \[(.*)\]$", re.DOTALL)
_REFERENCE = re.compile(r"^Resource '(.*?)' is not present in a registry", re.DOTALL)
_TOO_COSTLY = re.compile(
    r"too many|too big|too large|fuel exhausted|limit|Unable to determine|too complex", re.IGNORECASE
)


def reason_in_words(message: str) -> str:
    """Convert an error of the library to a short clause, without its internal positions and states."""
    text = message.replace("<non-verbose/>", "").strip()
    while match := _POSITION.match(text):
        text = text[match.end() :]
    text = text.removeprefix("failed to compile JSON schema: ").removeprefix("Parser Error: ")
    if "regex parse error" in text:
        errors: list[str] = _LAST_ERROR.findall(text)
        return _bounded(f"its regular expression is not valid: {errors[-1] if errors else 'it cannot be parsed'}")
    text = text.splitlines()[0].split("; following")[0] if text else "it cannot be followed"
    if text.startswith("it "):
        return _bounded(text)
    if "NoExtensionBias" in text:
        return "it allows no text at all"
    if match := _KEYWORDS.match(text):
        return _bounded(f"its JSON schema uses keywords that are not supported: {match[1].replace(chr(34), '')}")
    if match := _REFERENCE.match(text):
        return _bounded(f"its reference {match[1]} leads outside the schema; only #/... within it is followed")
    if "deeply nested" in text or "recursion limit" in text:
        return "it is nested too deeply"
    if "Token range" in text or "token range" in text:
        return _bounded(f"it is not valid: {text}")
    if _TOO_COSTLY.search(text):
        return _bounded(f"it is too costly to follow: {text}")
    return _bounded(f"it is not valid: {text}")


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
