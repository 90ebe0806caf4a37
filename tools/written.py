"""`write_or_compare`: what the tools do that write files of the repository, with and without `--check`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_or_compare(texts: Mapping[Path, str], arguments: Sequence[str], remedy: str) -> int:
    """Write each file, or with `--check` only compare it; the exit code: 1 if one is out of date, 2 for bad usage.

    `remedy`: the command that writes the files, for the sentence.
    """
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write(f"{remedy} takes no arguments but --check\n")
        return 2
    stale = {path: text for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if arguments:
            sys.stderr.write(f"{path.name} is out of date; run {remedy}\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    return 1 if arguments and stale else 0
