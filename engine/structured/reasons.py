"""`reason_in_words`: the library's error messages as sentences for the client. Called by the checker and the core."""

import re

_MAX_CHARACTERS = 300
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")
_LAST_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_KEYWORDS = re.compile(r"^Unimplemented keys: \[(.*)\]$", re.DOTALL)
_REFERENCE = re.compile(r"^Resource '(.*?)' is not present in a registry", re.DOTALL)
_TOO_COSTLY = re.compile(
    r"too many|too big|too large|fuel exhausted|limit|Unable to determine|too complex", re.IGNORECASE
)


def reason_in_words(message: str) -> str:
    """What is wrong, of bounded length, without positions and state of the library's own."""
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
