"""Renders one chat template that nobody vouches for, and ends. Run as a process by `engine.template_sandbox`.

Reads a JSON object from stdin; writes `+` and the text, or `-` and a sentence, to stdout.
"""

import json
import resource
import signal
import sys

from engine.chat_template import ChatTemplate
from models.errors import CheckpointError

CPU_SECONDS = 1.0
MEMORY_BYTES = 512 * 2**20
MAX_CHARACTERS = 16 * 2**20
"""What compiling and rendering may use, and write."""

TITLE = "the request's chat template"


def main() -> None:
    """Render under limits that the kernel holds: what is over its time ends by SIGPROF."""
    job = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        template = ChatTemplate({"default": job["template"]}, job["special_tokens"], TITLE, MAX_CHARACTERS)
        answer = "+" + template.render(job["messages"], job["tools"], job["add_generation_prompt"], **job["variables"])
    except (CheckpointError, ValueError) as error:
        answer = f"-{error}"
    except MemoryError:
        answer = f"-{TITLE} needs more than {MEMORY_BYTES >> 20} MiB of memory"
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()
