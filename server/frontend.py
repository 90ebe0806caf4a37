"""`Frontend`: what the routes work with. Knows whether the server is ready, and why it is not.

One a process, made by `server.app` and kept in the application's state.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.config.release import release
from engine.distributed.processes import keep_off
from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.io_processor import InputOutputProcessor
from engine.text.structured.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from models.errors import CheckpointError
from server.errors import ModelNotFound, NotReady, ShuttingDown
from server.limits.admission import Admission
from server.metrics import Metrics
from server.parsing.answer_format import AnswerFormat
from server.streaming.hub import Hub

_log = logging.getLogger(__name__)


class Frontend:
    """The API process's state: the core, the hub of live sequences, the metrics, and the loaded model's text side."""

    def __init__(self, config: Config, core: CoreManager) -> None:
        self.config = config
        self.version = release()
        self.fingerprint = f"kaon-{self.version}"
        self.model_names = (*config.model_names, *config.lora_paths)
        """What requests may call for: the model, by each of its names, the main one first; then adapters."""
        self._adapters = {name: number for number, name in enumerate(config.lora_paths, 1)}
        self.created = int(time.time())
        self._num_replicas = config.parallel_config.data_parallel_size
        self.metrics = Metrics(self.version, self._num_replicas)
        self.metrics.show_serving(lambda: core.serving)
        self.admission = Admission.of(config, self.metrics)
        self.hub = Hub(core, self.metrics, self.admission)
        self.failure: str | None = None
        """Why the server cannot go on; None while it can."""
        self._core = core
        self._processor: InputOutputProcessor | None = None
        self._answer_format: AnswerFormat | None = None
        self._grammars: GrammarCompiler | None = None
        self._closing = False

    async def start(self, on_ready: Callable[[tuple[str, ...]], object]) -> None:
        """Load tokenizer and chat template while the core loads the model; then serve; `on_ready` hears the names."""
        loop = asyncio.get_running_loop()
        self._core.attach(loop, self.hub.receive, self.metrics.core_restarted, self.metrics.requests_moved)
        parsers = self.config.server_config.tool_call_parser, self.config.server_config.reasoning_parser
        try:
            AnswerFormat.check_names(*parsers)
        except ValueError as error:
            self.failure = str(error)
            return
        try:
            tokenizer, template, defaults = await asyncio.to_thread(_load_text_side, self.config)
            ready = await self._core.wait_ready_async()
        except (CheckpointError, EngineDeadError) as error:
            self.failure = str(error)
            return
        except Exception as error:  # noqa: BLE001 - it ends the server, which says so
            _log.exception("start-up failed")
            self.failure = f"the tokenizer could not be loaded: {type(error).__name__}: {error}"
            return
        try:
            keep_off(ready.model.own_cpus)
        except OSError as error:
            _log.warning("the API process shares the engine's CPUs: the system refused to keep it off (%s)", error)
        self.admission.open(ready.model, self._num_replicas)
        self._answer_format = AnswerFormat.of_model(tokenizer, template, ready.model.architecture, *parsers)
        self._processor = InputOutputProcessor(tokenizer, template, ready.model, defaults)
        self._grammars = GrammarCompiler(
            max_bytes=self.config.server_config.max_grammar_bytes,
            vocab_size=ready.model.vocab_size,
            special_tokens={token_id: tokenizer.token(token_id) or "" for token_id in tokenizer.special_ids},
        )
        on_ready(self.model_names)

    def drain(self) -> None:
        """Take no more requests; the live ones go on."""
        self._closing = True

    def close(self) -> None:
        """Take no more requests and end the live ones with an error."""
        self.drain()
        self.hub.fail_all(ShuttingDown("the server is shutting down; send the request again later"))
        if self._grammars is not None:
            self._grammars.close()

    @property
    def why_ended(self) -> str | None:
        """Why the server must end, as a sentence; None while it can go on."""
        if self.failure is None and self._core.failure is not None:
            return self._core.failure.error
        return self.failure

    @property
    def processor(self) -> InputOutputProcessor:
        """The loaded model's text side. Raises `NotReady` unless requests can be served."""
        if self._closing:
            raise ShuttingDown("the server is shutting down; send the request again later")
        if self.why_ended is not None:
            raise NotReady(f"the server cannot serve: {self.why_ended}")
        if self._processor is None:
            raise NotReady("the model is still loading; try again in a moment")
        return self._processor

    def check_ready(self) -> None:
        """Raise `NotReady` unless a request that comes now is served now."""
        _ = self.processor
        if not self._core.is_serving:
            raise NotReady("the engine is being started again; requests wait for it")

    @property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and tool calls. Raises `NotReady` unless requests can be served."""
        if self._answer_format is None:
            raise NotReady("the model is still loading; try again in a moment")
        return self._answer_format

    @property
    def grammars(self) -> GrammarCompiler:
        """Checks the grammars of requests. Raises `NotReady` unless requests can be served."""
        if self._closing:
            raise ShuttingDown("the server is shutting down; send the request again later")
        if self._grammars is None:
            raise NotReady("the model is still loading; try again in a moment")
        return self._grammars

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus completion in tokens; None while the model loads."""
        return None if self._core.ready is None else self._core.ready.model.max_model_len

    def check_model(self, name: str) -> None:
        """Raise `ModelNotFound` unless `name` is served."""
        if name not in self.model_names:
            served = " or ".join(self.model_names)
            raise ModelNotFound(
                f"model is {name[:60]!r}, which this server does not serve; use {served}", param="model"
            )

    def adapter_of(self, name: str) -> int:
        """Number of the LoRA adapter that the model of that name is computed with; 0: none."""
        return self._adapters.get(name, 0)


def of(request: Request) -> Frontend:
    """The front end that `request` came to."""
    frontend: Frontend = request.app.state.frontend
    return frontend


def _load_text_side(config: Config) -> tuple[Tokenizer, ChatTemplate | None, GenerationDefaults]:
    checkpoint = resolve_checkpoint(config.model)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    defaults = GenerationDefaults.load(config.generation_config, checkpoint)
    file = config.server_config.chat_template
    if file is not None:
        return tokenizer, ChatTemplate.from_file(Path(file), checkpoint), defaults
    return tokenizer, ChatTemplate.from_checkpoint(checkpoint), defaults
