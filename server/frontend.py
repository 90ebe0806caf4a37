"""`Frontend`: the API process's state, which every route works with. Knows whether the server is ready, or why not.

`server.app` makes one and keeps it in the application's state.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from fastapi import FastAPI
from starlette.types import Scope

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.config.release import release
from engine.distributed.processes import avoid_cpus
from engine.messages import ModelInfo
from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.io_processor import InputOutputProcessor
from engine.text.pooling import PoolingProcessor
from engine.text.structured.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from models.architectures.pooling import PoolingConfig, read_pooling
from models.errors import CheckpointError
from server.adapters import Adapters
from server.errors import ModelNotFound, NotReady, ShuttingDown, WrongTask
from server.limits.accounts import Accounts
from server.limits.admission import Admission
from server.limits.jobs import NUM_GRAMMAR_CHECKS, Jobs
from server.limits.owners import Owner
from server.metrics import Metrics
from server.parsing.answer_format import AnswerFormat
from server.parsing.registry import NONE
from server.reload import Reloader
from server.sealing import Seal
from server.streaming.hub import Hub
from server.streaming.resumable import ResumableStreams

_log = logging.getLogger(__name__)


_BODY_BYTES_PER_TOKEN = 32
"""Text has 4 bytes a token, up to 16 where all of it is escaped, and token ids have 8; several prompts have more."""
_LEAST_BODY_LIMIT, _MOST_BODY_LIMIT = 4 * 2**20, 32 * 2**20

_ENDPOINTS_OF = {
    "embed": "/v1/embeddings, /score, /rerank and /pooling",
    "classify": "/classify, /score, /rerank and /pooling",
}
"""What a model is for, by its task."""

_SHUTTING_DOWN = "the server is shutting down; send the request again later"


class LoadedModel(NamedTuple):
    """What the API process needs to know of the model that the core has loaded."""

    processor: InputOutputProcessor
    answer_format: AnswerFormat
    """How the model writes reasoning and tool calls."""
    grammars: GrammarCompiler
    """Checks the grammars of requests."""
    max_model_len: int
    """Longest prompt plus completion in tokens."""
    pooling: PoolingProcessor | None
    """Makes prompts for embeddings, classes or scores; None: the model only generates."""


class Frontend:
    """The core, the live sequences, admission, the metrics and, once it is loaded, the model's text side."""

    def __init__(
        self,
        config: Config,
        core: CoreManager,
        ids: Iterator[int] | None = None,
        *,
        read_config: Callable[[], Config] | None = None,
    ) -> None:
        """`ids`: where others use the core too, the source of the ids of sequences that they share. `read_config`
        reads the configuration again; None: it cannot be.
        """
        self.config = config
        self.version = release()
        self.fingerprint = f"kaon-{self.version}"
        self.shares_prefix_cache = config.server_config.share_prefix_cache
        """Whether requests of different keys share cached prefixes."""
        self.adapters = Adapters(config, core)
        self.created = int(time.time())
        self._num_replicas = config.parallel_config.data_parallel_size
        aliases_for = config.model_names[0] if config.server_config.metrics_aliases == "vllm" else None
        self.metrics = Metrics(self.version, self._num_replicas, aliases_for)
        self.metrics.show_model(lambda: None if core.ready is None else core.ready.model, lambda: self.adapters.names)
        self.metrics.show_serving(lambda: core.serving)
        self.metrics.show_core_pids(lambda: core.local_pids)
        self.accounts = Accounts()
        self.metrics.show_owners(self.accounts.by_label)
        self.jobs = Jobs(self.accounts)
        self.admission = Admission.of(config, self.metrics, self.accounts)
        self.hub = Hub(core, self.metrics, self.admission, self.adapters.model_name, ids)
        self.reloader = Reloader(config, read_config)
        """Puts changed settings in force. What it cannot change stays as in `config`."""
        self.reloader.add(self.admission.limit)
        self.reloader.add(lambda settings: core.set_log_level(settings.log_level))
        settings = config.server_config
        self.streams = ResumableStreams(
            settings.resumable_stream_bytes,
            settings.resumable_stream_seconds,
            16 * settings.resumable_stream_bytes,
            self.accounts,
        )
        self.seal = Seal.of(settings)
        """Seals what clients keep for the server, and reads it again."""
        self.failure: str | None = None
        """Why the server cannot go on; None while it can."""
        self._core = core
        self._loaded: LoadedModel | None = None
        self._is_closing = False
        self._sleeping = asyncio.Lock()

    @classmethod
    def of(cls, app: FastAPI) -> Self:
        """The front end of an application."""
        frontend: Self = app.state.frontend
        return frontend

    async def start(self, on_ready: Callable[[tuple[str, ...]], object]) -> None:
        """Load tokenizer and chat template while the core loads the model. Calls `on_ready` with the served names."""
        loop = asyncio.get_running_loop()
        self._core.attach(loop, self.hub.receive, self.hub.core_restarted, self.metrics.requests_moved)
        parsers = self.config.server_config.tool_call_parser, self.config.server_config.reasoning_parser
        try:
            AnswerFormat.check_names(*parsers)
        except ValueError as error:
            self.failure = str(error)
            return
        try:
            tokenizer, template, defaults, pooling = await asyncio.to_thread(_load_text_side, self.config)
            ready = await self._core.wait_ready_async()
        except (CheckpointError, EngineDeadError) as error:
            self.failure = str(error)
            return
        except Exception as error:  # noqa: BLE001 - the server ends and reports it
            _log.exception("start-up failed")
            self.failure = f"the tokenizer could not be loaded: {type(error).__name__}: {error}"
            return
        try:
            avoid_cpus(ready.model.own_cpus)
        except OSError as error:
            _log.warning("the API process shares the engine's CPUs: the system refused to keep it off (%s)", error)
        self.open(ready.model, tokenizer, template, defaults, pooling)
        on_ready(self.model_names)

    def open(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: GenerationDefaults,
        pooling: PoolingConfig | None = None,
    ) -> None:
        """Take requests for the loaded model. Raises `ValueError` for a parser that does not exist.

        `pooling`: how it pools prompts; None: it does not.
        """
        parsers = self.config.server_config.tool_call_parser, self.config.server_config.reasoning_parser
        self.admission.open(model, self._num_replicas)
        grammars = GrammarCompiler(
            max_bytes=self.config.server_config.max_grammar_bytes,
            vocab_size=model.vocab_size,
            num_processes=NUM_GRAMMAR_CHECKS,
            special_tokens={token_id: tokenizer.token(token_id) or "" for token_id in tokenizer.special_ids},
        )
        processor = InputOutputProcessor(
            tokenizer,
            template,
            model,
            defaults,
            self.config.bos_token_id,
            clips_max_tokens=self.config.server_config.max_tokens_overflow == "clamp",
        )
        self._loaded = LoadedModel(
            processor,
            AnswerFormat.of_model(tokenizer, template, model.architecture, *parsers),
            grammars,
            model.max_model_len,
            None if pooling is None else PoolingProcessor(processor, pooling),
        )

    def drain(self) -> None:
        """Refuse new requests; the live ones go on."""
        self._is_closing = True

    def close(self) -> None:
        """Refuse new requests and end the live ones with an error."""
        self.drain()
        self.hub.fail_all(ShuttingDown(_SHUTTING_DOWN))
        if self._loaded is not None:
            self._loaded.grammars.close()
        self.jobs.close()

    @property
    def why_ended(self) -> str | None:
        """Why the server must end, as a sentence; None while it can go on."""
        if self.failure is None and self._core.failure is not None:
            return self._core.failure.error
        return self.failure

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model. Raises `NotReady` unless requests can be served."""
        if self._is_closing:
            raise ShuttingDown(_SHUTTING_DOWN)
        if self.why_ended is not None:
            raise NotReady(f"the server cannot serve: {self.why_ended}")
        if self._loaded is None:
            raise NotReady("the model is still loading; try again in a moment")
        if self._core.is_asleep:
            raise NotReady("the server sleeps; an operator wakes it with POST /wake_up")
        return self._loaded

    @property
    def is_asleep(self) -> bool:
        """Whether the engine's memory is given back, and requests are held or refused."""
        return self._core.is_asleep

    async def sleep(self, level: int) -> None:
        """Give memory back: live requests are held where they are, and new ones refused. Raises an `ApiError`."""
        async with self._sleeping:
            if not self._core.is_asleep:
                self.check_ready()
                await asyncio.shield(self._core.sleep(level))

    async def wake_up(self) -> None:
        """Continue live requests and accept new ones. Raises `NotReady` where the engine cannot be started again."""
        async with self._sleeping:
            if self._core.is_asleep:
                try:
                    await asyncio.shield(self._core.wake_up())
                except EngineDeadError as error:
                    raise NotReady(f"the server cannot serve: {error}") from error

    def check_loaded(self) -> None:
        """Raise `NotReady` unless requests are taken; they may have to wait while the engine restarts."""
        _ = self.loaded

    def check_ready(self) -> None:
        """Raise `NotReady` unless a request that arrives now is served at once."""
        self.check_loaded()
        if not self._core.is_serving:
            raise NotReady("the engine is being started again; requests wait for it")

    @property
    def max_request_bytes(self) -> int:
        """Largest request body in bytes: as configured, or what a full context needs."""
        limit = self.config.server_config.max_request_bytes
        if limit is not None:
            return limit
        needed = _BODY_BYTES_PER_TOKEN * (self.max_model_len or 0)
        return min(max(needed, _LEAST_BODY_LIMIT), _MOST_BODY_LIMIT)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus completion in tokens; None while the model loads."""
        return None if self._core.ready is None else self._core.ready.model.max_model_len

    @property
    def reasons(self) -> bool:
        """Whether the model writes reasoning; false while it loads."""
        return self._loaded is not None and self._loaded.answer_format.reasoning_parser != NONE

    @property
    def model_names(self) -> tuple[str, ...]:
        """Values of `model` in requests: the model's names, the main one first, then the adapters'."""
        return (*self.config.model_names, *self.adapters.names)

    def check_model(self, name: str) -> None:
        """Raise `ModelNotFound` unless `name` is served."""
        if name not in self.model_names:
            served = " or ".join(self.model_names)
            raise ModelNotFound(
                f"model is {name[:60]!r}, which this server does not serve; use {served}", param="model"
            )

    def check_generates(self) -> None:
        """Raise `WrongTask` where the loaded model generates nothing."""
        pooling = self.loaded.pooling
        if pooling is not None and "generate" not in self.config.task:
            what = _ENDPOINTS_OF[pooling.pooling.task]
            raise WrongTask(
                f"the model of this server does not generate text; it serves {what}, see docs/embeddings.md",
                param="model",
            )

    def pooling_for(self, *tasks: str) -> PoolingProcessor:
        """What makes the prompts of an endpoint that needs a model for one of `tasks`. Raises `WrongTask`."""
        pooling = self.loaded.pooling
        if pooling is not None and pooling.pooling.task in tasks:
            return pooling
        what = "generates text" if pooling is None else f"serves {_ENDPOINTS_OF[pooling.pooling.task]}"
        needed = " or ".join(tasks)
        raise WrongTask(
            f"the model of this server {what}; this endpoint needs one that is served to {needed} (--task {tasks[0]})",
            param="model",
        )

    def adapter_of(self, name: str) -> int:
        """Number of the LoRA adapter with the served name `name`; 0 if the name is the model's own."""
        return self.adapters.number_of(name)


def owner_of(scope: Scope) -> Owner:
    """The party that a request is accounted to."""
    owner: Owner = scope["state"]["owner"]
    return owner


def _load_text_side(config: Config) -> tuple[Tokenizer, ChatTemplate | None, GenerationDefaults, PoolingConfig | None]:
    checkpoint = resolve_checkpoint(config.model)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    defaults = GenerationDefaults.load(config.generation_config, checkpoint)
    pooling = read_pooling(checkpoint, config.task, matryoshka=config.matryoshka)
    file = config.server_config.chat_template
    if file is not None:
        template: ChatTemplate | None = ChatTemplate.from_file(Path(file), checkpoint)
    else:
        template = ChatTemplate.from_checkpoint(checkpoint)
    return tokenizer, template, defaults, pooling
