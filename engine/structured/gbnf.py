"""`lark_of_gbnf`: the EBNF of GBNF and of Python libraries (`root ::= …`) as Lark. Run by the checker's process.

The library converts; what it does not read (rules over several lines, escapes by code point) is rewritten before.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\\n])*\])|(?P<comment>\#[^\n]*)|(?P<head>(?<![\w-])[\w-]+\s*::=)"""
)
_CODE_POINT = re.compile(r"\\(?:(\\)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def is_gbnf(grammar: str) -> bool:
    """Whether a rule is written `name ::= …`, which Lark has nothing like."""
    return any(match["head"] for match in _TOKEN.finditer(grammar))


def lark_of_gbnf(grammar: str) -> str:
    """The grammar in Lark. Raises `ValueError` with the library's reason."""
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
        raise ValueError(f"{escape[0]} is no character")
    character = chr(number)
    if character in '"\\[]':
        return "\\" + character
    return character if number >= 0x20 else f"\\x{number:02x}"
