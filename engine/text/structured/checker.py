"""Checks untrusted grammars in a separate process, which `engine.text.structured.compiler` starts.

The grammar library is native code: a hostile schema could take minutes, or overflow the stack, which would end the
server. In this process, the kernel enforces limits: it ends the process, and the parent starts another one.
`engine.text.sandbox` restricts the process in other respects.
"""

import random
import re
import signal
import struct
import sys
import threading

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.text.sandbox import confine, forbid_processes
from engine.text.structured.parser_setup import CHECK_CPU_SECONDS, CHECK_MEMORY_BYTES, CHECK_STACK_BYTES, PARSER_LIMITS
from engine.text.structured.spec import reason_in_words, without_forcing

# The library converts GBNF and the EBNF of Python libraries (`root ::= …`) to Lark. It does not support rules over
# several lines and escapes by code point, so these are rewritten first.

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\\n])*\])|(?P<comment>\#[^\n]*)|(?P<head>(?<![\w-])[\w-]+\s*::=)"""
)
_CODE_POINT = re.compile(r"\\(?:(\\)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def is_gbnf(grammar: str) -> bool:
    """Return whether a rule has the form `name ::= …`, which is not Lark."""
    return any(match["head"] for match in _TOKEN.finditer(grammar))


def lark_of_gbnf(grammar: str) -> str:
    """Convert a GBNF grammar to Lark. Raises `ValueError` with the library's reason."""
    try:
        return str(gbnf_to_lark(_one_line_a_rule(grammar)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the library raises plain ones
        raise ValueError(str(error).split(" at line ")[0]) from None


def _one_line_a_rule(grammar: str) -> str:
    pieces: list[str] = []
    end = 0
    for match in _TOKEN.finditer(grammar):
        pieces.append(grammar[end : match.start()].replace("\r", " ").replace("\n", " "))
        if match["head"]:
            pieces.append("\n" + match[0].replace("\n", " "))
        elif not match["comment"]:
            pieces.append(_CODE_POINT.sub(_character, match[0]))
        end = match.end()
    pieces.append(grammar[end:].replace("\r", " ").replace("\n", " "))
    return "".join(pieces).lstrip() + "\n"


def _character(escape: re.Match[str]) -> str:
    if escape[1]:
        return escape[0]
    number = int(escape[2] or escape[3], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"{escape[0]} is not a character")
    character = chr(number)
    if character in '"\\[]':
        return "\\" + character
    return character if number >= 0x20 else f"\\x{number:02x}"


_WALK_STEPS = 40
"""Bytes that are generated as a trial. It finds faults that only occur in use, such as a grammar that allows no
text."""

_NAMED_IDS = re.compile(r"<\[([0-9,\s-]+)\]>")
_NUMBER = re.compile(r"(?<![0-9-])[0-9]{1,10}")


class Vocabulary(msgspec.Struct):
    """First message to the process: the part of the model's vocabulary that grammars can refer to."""

    size: int
    special: dict[int, str]


class Check(msgspec.Struct):
    """A grammar to check: Lark, or with `ebnf` a user's text, which may be GBNF."""

    text: str
    ebnf: bool = False


class Verdict(msgspec.Struct):
    """The result: `lark` is the text to use, or `error` is the reason why there is none."""

    lark: str = ""
    error: str | None = None


class _ByteTokens:
    """A vocabulary of all single bytes, with the model's special tokens at their own ids."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = max(vocabulary.size, max(vocabulary.special, default=0) + 1)
        self.tokens = [b""] * size
        for token_id, text in vocabulary.special.items():
            self.tokens[token_id] = text.encode()
        free = [token_id for token_id in range(min(size, 4096)) if token_id not in vocabulary.special][:256]
        for byte in range(256):
            if byte < len(free):
                self.tokens[free[byte]] = bytes([byte])
            else:
                self.tokens.append(bytes([byte]))
        self.eos_token_id = len(self.tokens)
        self.tokens.append(b"<|the end|>")
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return []


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteTokens(vocabulary)))


def _named_ids(lark: str, size: int) -> set[int]:
    """Ids that a grammar names as `<[1,5-7]>`, only the first of a range: the vocabulary needs tokens for them."""
    ids = (int(number) for named in _NAMED_IDS.findall(lark) for number in _NUMBER.findall(named))
    return {token_id for token_id in ids if token_id < size}


def checked(check: Check, tokenizer: LLTokenizer, vocabulary: Vocabulary) -> Verdict:
    """Check a grammar. May take any time, memory or stack."""
    lark = check.text
    if check.ebnf:
        try:
            lark = lark_of_gbnf(lark) if is_gbnf(lark) else _lark_alone(lark)
        except ValueError as error:
            return Verdict(error=reason_in_words(str(error)))
    if named := _named_ids(lark, vocabulary.size) - vocabulary.special.keys():
        special = vocabulary.special | {token_id: f"<|token {token_id}|>" for token_id in named}
        tokenizer = _tokenizer(Vocabulary(vocabulary.size, special))
    matcher = LLMatcher(tokenizer, without_forcing(lark), log_level=0, limits=PARSER_LIMITS)
    trouble = reason_in_words(matcher.get_error()) if matcher.is_error() else _walk(matcher)
    return Verdict(error=trouble) if trouble else Verdict(lark)


def _lark_alone(text: str) -> str:
    """Return `text` unless it is JSON, which the library would interpret as a list of grammars."""
    if text.lstrip().startswith("{"):
        raise ValueError("it is neither Lark nor GBNF")
    return text


def _walk(matcher: LLMatcher) -> str | None:
    """Generate a text as a trial. Returns the error, or None."""
    chance = random.Random(0)
    for _ in range(_WALK_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return reason_in_words(matcher.get_error())
        if matcher.is_stopped():
            return None
        allowed = [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        if not allowed:
            return "it allows no text at all"
        if not matcher.consume_token(chance.choice(allowed)):
            return reason_in_words(matcher.get_error())
    return None


def main() -> None:
    """Announce the start by an empty message, then answer checks from standard input until it ends.

    Messages are msgpack, each preceded by its length.
    """
    confine(CHECK_MEMORY_BYTES)
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    threading.stack_size(CHECK_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    forbid_processes()
    frame = _read()
    if frame is None:
        return
    vocabulary = msgspec.msgpack.decode(frame, type=Vocabulary, strict=False)
    tokenizer = _tokenizer(vocabulary)
    _write(b"")
    while (frame := _read()) is not None:
        check = msgspec.msgpack.decode(frame, type=Check)
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_SECONDS)
        verdict = checked(check, tokenizer, vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(msgspec.msgpack.encode(verdict))


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("!I", len(content)) + content)
    sys.stdout.buffer.flush()


def _read() -> bytes | None:
    head = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(struct.unpack("!I", head)[0]) if len(head) == 4 else None


if __name__ == "__main__":
    main()
