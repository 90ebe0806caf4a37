"""`kaon verify [MODEL] [flags]`: checks that a model's answers do not depend on how it is run; see
`engine.client.verify`."""

import sys
from collections.abc import Sequence

_USAGE = "usage: kaon verify [MODEL] [flags of kaon serve]\n"


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0 if all answers are equal, 1 if some differ or an engine fails, 2 for a
    wrong flag."""
    if list(arguments) in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        return 0
    from engine.client.core_manager import EngineDeadError
    from engine.client.verify import verify
    from engine.config.settings import SettingsError, load_config

    try:
        config = load_config(arguments)
    except SettingsError as error:
        sys.stderr.write(f"kaon verify: {error}\n")
        return 2
    is_right = True
    try:
        for proof in verify(config):
            sys.stdout.write(f"{proof}\n")
            sys.stdout.flush()
            is_right &= proof.is_right
    except (ValueError, RuntimeError, EngineDeadError) as error:
        sys.stderr.write(f"kaon verify: {error}\n")
        return 1
    sys.stdout.write("Answers do not depend on company, chunks, caches, preemption or restarts\n" if is_right else "")
    return 0 if is_right else 1
