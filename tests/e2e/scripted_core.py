"""An engine core with a scripted model: the real server, loop and sockets around chosen answers.

It runs in place of `engine.core.main`. `SCRIPTED_CORE` in its environment names a JSON file: a list of rules `{"when":
PATTERN, "say": TEXT}`. The answer to a prompt is the text of the first rule whose pattern occurs in the prompt; a
prompt without a rule is answered with `NO_RULE`. The tokens are those of the embedded checkpoint, so that text passes
its tokenizer, its chat template and the parsers of its dialects.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.core import main as core_main
from engine.core.scheduler import Scheduler
from engine.core.startup import PhaseClock, StartedModel
from engine.sequence import Sequence
from engine.text.tokenizer import Tokenizer
from tests.e2e.stub_core import EOS, StubRunner, model_of

NO_RULE = "No rule of the script fits this prompt."
SCRIPT = "SCRIPTED_CORE"
CONTEXT = "SCRIPTED_CORE_CONTEXT"
"""Variable with the length of the context; default: 131072."""


class Script:
    """The rules, and the answers of the running sequences."""

    def __init__(self, file: Path, tokenizer: Tokenizer) -> None:
        rules: list[dict[str, Any]] = json.loads(file.read_text())
        self._rules = [(re.compile(rule["when"], re.DOTALL), rule["say"]) for rule in rules]
        self._tokenizer = tokenizer
        self._answers: dict[int, tuple[int, list[int]]] = {}

    def begin(self, seq: Sequence) -> None:
        """Choose the answer to the prompt of `seq`."""
        prompt = self._tokenizer.decode(seq.token_ids[: seq.num_prompt_tokens], skip_special_tokens=False)
        text = next((say for pattern, say in self._rules if pattern.search(prompt)), NO_RULE)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self._answers[seq.id] = (seq.num_prompt_tokens, [*tokens, EOS])

    def token(self, seq_id: int, length: int) -> int:
        """The token after the first `length` tokens of a sequence."""
        start, tokens = self._answers[seq_id]
        return tokens[min(max(length - start, 0), len(tokens) - 1)]


class ScriptedRunner(StubRunner):
    """Samples the tokens of the script, at most five hundred per second for each sequence."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        time.sleep(0.002)
        lengths = zip(batch.req_ids, batch.context_lens, strict=True)
        return ScheduledBatchOutput({id: (self._script.token(id, length),) for id, length in lengths})


def start_model(config: Config, phases: PhaseClock, *others: object) -> StartedModel:
    """A replacement of `engine.core.startup.start_model`."""
    context = int(os.environ.get(CONTEXT, "131072"))
    script = Script(Path(os.environ[SCRIPT]), Tokenizer.from_checkpoint(resolve_checkpoint(None)))
    add = Scheduler.add

    def add_scripted(self: Scheduler, seq: Sequence) -> None:
        script.begin(seq)
        add(self, seq)

    Scheduler.add = add_scripted  # type: ignore[method-assign]
    runner = ScriptedRunner(script)
    return model_of(runner, config, "ScriptedForCausalLM", num_blocks=32_768, context=context)


if __name__ == "__main__":
    core_main.start_model = start_model
    core_main.main()
