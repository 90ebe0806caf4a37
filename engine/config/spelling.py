"""`nearest`: which known name a wrong one may be a slip of. Ends sentences on flags, settings, fields and paths."""

from collections.abc import Iterable

_READ_CHARACTERS = 100
"""Characters of a wrong name that are compared: a name may be as long as a request."""


def nearest(wrong: str, known: Iterable[str], *, prefix: str = "", likeness: float = 0.6) -> str:
    """A hint to end a sentence with: the known name that `wrong` may be a slip of, or nothing.

    `prefix` is what all names begin with, and says nothing of which is meant. `likeness`: from 0, anything will do, to
    1, the name itself.
    """
    import difflib

    names = {name.removeprefix(prefix): name for name in known}
    wrong = wrong[:_READ_CHARACTERS].removeprefix(prefix)
    match = difflib.get_close_matches(wrong, names, n=1, cutoff=likeness)
    return f"; did you mean {names[match[0]]}?" if match else ""
