"""Helpers for the tests of admission, deadlines and slow readers: a front end over a scripted core."""

from collections.abc import Sequence
from typing import Any, cast

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.messages import AddRequest, ModelInfo, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams
from engine.text.io_processor import InputOutputProcessor
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.limits.admission import Admission
from server.limits.jobs import Jobs
from server.metrics import Metrics
from server.routes.completions import CompletionRenderer, PromptEcho
from server.schemas.completions import CompletionRequest
from server.streaming.generation import Generation
from server.streaming.hub import Hub

TOKENIZER = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
WORD = TOKENIZER.encode("Hello", add_special_tokens=False)
PROMPT = [5, 6, 7]
_INFO = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 8192, [], 16, 1024)


class ScriptedCore:
    """Accepts and pauses requests; at `step`, its sequences write one word each."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.paused: set[int] = set()
        self.aborted: list[int] = []
        self.is_dead = False
        self.hub: Hub

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        if self.is_dead:
            raise EngineDeadError("the engine core has stopped")
        self.running |= {request.request_id for request in requests}

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted += request_ids
        self.running -= set(request_ids)
        self.paused -= set(request_ids)

    def pause(self, request_ids: Sequence[int]) -> None:
        self.paused |= self.running & set(request_ids)
        self.running -= self.paused

    def resume(self, request_ids: Sequence[int]) -> None:
        self.running |= self.paused & set(request_ids)
        self.paused -= self.running

    def step(self, ids: Sequence[int] | None = None, *, last: bool = False, error: str | None = None) -> None:
        """Let sequences, by default all, write a word; then, optionally, finish or fail."""
        ids = sorted(self.running) if ids is None else ids
        if last or error is not None:
            self.running -= set(ids)
        if error is not None:
            outputs = [RequestOutput(id, [], finished=True, finish_reason="error", error=error) for id in ids]
        else:
            outputs = [RequestOutput(id, WORD, last, "max_tokens" if last else None) for id in ids]
        self.hub.receive(StepOutputs(outputs))


class FrontEnd:
    """The part of the front end that a `Generation` needs, over a `ScriptedCore`."""

    def __init__(self, **settings: Any) -> None:
        self._config = config = Config(server_config=ServerConfig(**settings))
        self.core = ScriptedCore()
        self.metrics = Metrics("1")
        self.admission = Admission.of(config, self.metrics)
        self.admission.open(_INFO)
        answers = Jobs(self.admission.accounts).answers
        self.hub = self.core.hub = Hub(cast(CoreManager, self.core), self.metrics, self.admission, answers)
        self._processor = InputOutputProcessor(TOKENIZER, None, _INFO)

    def generation(
        self, arrival_time: float, n: int = 1, params: SamplingParams | None = None, **keywords: Any
    ) -> Generation:
        """A request of `n` choices of one prompt."""
        prompt = self._processor.check(PROMPT, params or SamplingParams())
        sequences = self._processor.new_sequences(prompt, self.hub.new_ids(n), arrival_time=arrival_time)
        return Generation(self.hub, self._config, sequences, n, **keywords)

    def count(self, name: str) -> float:
        """The sum of a counter of requests over its reasons."""
        lines = self.metrics.render().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def renderer(n: int = 1) -> CompletionRenderer:
    request = CompletionRequest(model="m", prompt=["x"], n=n, stream=True)
    return CompletionRenderer(request, TOKENIZER, "f", [PromptEcho(PROMPT, "")])
