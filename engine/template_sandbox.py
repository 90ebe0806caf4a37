"""`render_untrusted`: a chat template that a request brings, rendered in a process that can be killed.

Jinja's sandbox keeps a template from the interpreter's insides, but not from computing for ever, in a loop or within
one operation that no thread could be stopped in. Called by `InputOutputProcessor`.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from engine.template_worker import CPU_SECONDS, TITLE
from models.child_environment import own_code_without_settings

_WALL_SECONDS = 5.0
"""From the process' start to its end, where the machine is too busy to give it its CPU time."""

_AT_A_TIME = threading.BoundedSemaphore(2)
"""So that templates take no more than their share of the machine from the requests of others."""


def render_untrusted(
    template: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt's text; blocks for some 0.1 s, and at most a few seconds. Raises `ValueError`, a sentence.

    The limits are those of `engine.template_worker`.
    """
    job = {
        "template": template,
        "special_tokens": dict(special_tokens),
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "variables": variables,
    }
    with _AT_A_TIME:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "engine.template_worker"],
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=own_code_without_settings(),
                cwd="/",
                timeout=_WALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{TITLE} was not rendered within {_WALL_SECONDS:g} s") from error
    answer = done.stdout.decode("utf-8", "surrogatepass")
    if answer.startswith("+"):
        return answer[1:]
    raise ValueError(answer[1:] or f"{TITLE} took more than {CPU_SECONDS:g} s, or more memory than it may use")
