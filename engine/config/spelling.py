"""`nearest`: suggests a known name for a misspelled one, in errors about flags, settings, fields and paths."""

from collections.abc import Iterable

_READ_CHARACTERS = 100
"""Characters of a wrong name that are compared: a name may be as long as a request."""


def nearest(wrong: str, known: Iterable[str], *, prefix: str = "", likeness: float = 0.6) -> str:
    """Return the end of a sentence that suggests the most similar known name; "" if none is similar enough.

    `prefix` is a common prefix of the names, which is not compared. `likeness` is the least similarity of a suggested
    name, from 0 to 1, where 1 means equal.
    """
    import difflib

    names = {name.removeprefix(prefix): name for name in known}
    wrong = wrong[:_READ_CHARACTERS].removeprefix(prefix)
    match = difflib.get_close_matches(wrong, names, n=1, cutoff=likeness)
    return f"; did you mean {names[match[0]]}?" if match else ""
