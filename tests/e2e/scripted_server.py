"""`ScriptedServer`: a real server with a scripted model, for tests of agents and of their requests.

`python -m tests.e2e.scripted_server SCRIPT [FLAGS]` is `kaon serve` with such a model. See `scripted_core`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.distributed import core_process
from server.cli import main as kaon
from tests.e2e.kaon_server import KaonServer, free_port
from tests.e2e.scripted_core import CONTEXT, SCRIPT

_CORE = "scripted_core"
_PATH = str(Path(__file__).parent)

MESSAGES_AS_JSON = "{{ messages | tojson }}{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
"""A chat template that shows all parts of a conversation, so that rules can match them."""


class ScriptedServer(KaonServer):
    """Answers by its rules: pairs of a pattern of the prompt and a text; the first that matches counts."""

    def __init__(self, log: Path, rules: Sequence[tuple[str, str]], *, context: int = 131072, **settings: Any) -> None:
        script = log.with_suffix(".rules.json")
        script.write_text(json.dumps([{"when": when, "say": say} for when, say in rules]))
        template = log.with_suffix(".jinja")
        template.write_text(MESSAGES_AS_JSON)
        face = {"chat_template": str(template), "tool_call_parser": "hermes", "reasoning_parser": "think"}
        settings["server_config"] = {**face, **settings.get("server_config", {})}
        super().__init__(
            log,
            free_port(),
            before=f"from engine.distributed import core_process; core_process.CORE_MODULE = {_CORE!r}; ",
            environment={SCRIPT: str(script), CONTEXT: str(context), "PYTHONPATH": _paths()},
            **settings,
        )


def _paths() -> str:
    return os.pathsep.join(filter(None, [_PATH, os.environ.get("PYTHONPATH")]))


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit code."""
    script, *flags = arguments
    os.environ.update({SCRIPT: str(Path(script).resolve()), "PYTHONPATH": _paths()})
    core_process.CORE_MODULE = _CORE
    return kaon(["serve", *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
