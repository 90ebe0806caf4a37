"""`Frontend`: everything that routes need to serve one model, with its state: loading, ready, asleep or failed.

`Shared` holds the objects that the front ends of all models of a server share. `server.models` holds the front ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.client.core_manager import CoreManager, EngineDeadError, WeightsError
from engine.config.config import Config
from engine.config.paths import resolve_checkpoint, weights_digest
from engine.config.release import release
from engine.config.settings import ModelList
from engine.distributed.processes import avoid_cpus
from engine.messages import ModelInfo, Ready
from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import GenerationDefaults, read_json_object
from engine.text.io_processor import InputOutputProcessor
from engine.text.pooling import PoolingProcessor
from engine.text.structured.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from models.architectures.pooling import PoolingConfig, read_pooling
from models.config.weight_files import read_header
from models.errors import CheckpointError
from server.adapters import Adapters, allowed_directory
from server.errors import BadRequest, ModelNotFound, NotReady, PathNotAllowed, ShuttingDown, WrongTask
from server.limits.accounts import Accounts
from server.limits.admission import Admission
from server.limits.jobs import NUM_GRAMMAR_CHECKS, Jobs
from server.limits.quotas import QuotaMeter
from server.metrics import Metrics
from server.parsing.answer_format import AnswerFormat
from server.parsing.registry import NONE
from server.reload import Reloader
from server.sealing import Seal
from server.streaming.hub import Hub
from server.streaming.resumable import ResumableStreams

_log = logging.getLogger(__name__)


_BODY_BYTES_PER_TOKEN = 32
"""Bytes of a request body per token of the context: text has about 4, escaped text up to 16, token ids 8. The rest
leaves room for several prompts."""
_LEAST_BODY_LIMIT, _MOST_BODY_LIMIT = 4 * 2**20, 32 * 2**20

_ENDPOINTS_OF = {
    "embed": "/v1/embeddings, /score, /rerank and /pooling",
    "classify": "/classify, /score, /rerank and /pooling",
}
"""Endpoints that a pooling model serves, by its task."""

SHUTTING_DOWN = "the server is shutting down; send the request again later"


class ServedModel(NamedTuple):
    """What the API process needs to serve a model."""

    processor: InputOutputProcessor
    answer_format: AnswerFormat
    """The syntax in which the model writes reasoning and tool calls."""
    grammars: GrammarCompiler
    """Checks the grammars of requests."""
    max_model_len: int
    """Longest prompt plus completion in tokens."""
    pooling: PoolingProcessor | None
    """Builds prompts for embeddings, classes or scores; None if the model only generates."""


class Shared:
    """Objects that all models of a server share: accounts of owners, threads, metrics, and resumable streams."""

    def __init__(
        self,
        config: Config,
        num_replicas: int | Mapping[str, int] = 1,
        read_config: Callable[[], Config] | None = None,
        models: ModelList | None = None,
    ) -> None:
        """`num_replicas` as for `Metrics`. `read_config` and `models` as for `Reloader`."""
        settings = config.server_config
        aliases_for = config.model_names[0] if settings.metrics_aliases == "vllm" else None
        self.version = release()
        self.created = int(time.time())
        self.metrics = Metrics(self.version, num_replicas, aliases_for)
        self.accounts = Accounts()
        self.metrics.show_owners(self.accounts.by_label)
        self.quotas = QuotaMeter(self.accounts)
        self.quotas.limit(settings)
        self.jobs = Jobs(self.accounts)
        self.reloader = Reloader(config, read_config, models)
        """Applies changed settings to the running server."""
        self.reloader.add(self.quotas.limit)
        self.streams = ResumableStreams(
            settings.resumable_stream_bytes,
            settings.resumable_stream_seconds,
            16 * settings.resumable_stream_bytes,
            self.accounts,
        )
        self.seal = Seal.of(settings)
        """Encrypts and decrypts texts that clients store for the server."""


class Frontend:
    """One model: its core, its live sequences, their admission and, once it is loaded, its tokenizer and parsers."""

    def __init__(
        self,
        config: Config,
        core: CoreManager,
        ids: Iterator[int] | None = None,
        *,
        shared: Shared | None = None,
        first_replica: int = 0,
        is_taken: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`ids` generates ids of sequences; pass it if other users of the core share the ids. `shared` is None if the
        server has only this model. `first_replica` is the number in metrics of the model's first replica.
        `is_taken(name)` returns whether another model has that name, so that no adapter of this model may have it.
        """
        self.config = config
        self._num_replicas = config.parallel_config.data_parallel_size
        shared = Shared(config, self._num_replicas) if shared is None else shared
        self._version = shared.version
        self._weights: str | None = None
        """Digest of the served weights; None until they are loaded."""
        self.created = shared.created
        self.shares_prefix_cache = config.server_config.share_prefix_cache
        """Whether requests of different keys share cached prefixes."""
        self.adapters = Adapters(config, core, is_taken)
        self.metrics, self.accounts, self.jobs = shared.metrics, shared.accounts, shared.jobs
        self.streams, self.seal = shared.streams, shared.seal
        self._first_replica = first_replica
        self.metrics.show_engine(
            serving=lambda: core.serving,
            model=lambda: None if core.ready is None else core.ready.model,
            pids=lambda: core.local_pids,
            adapters=lambda: self.adapters.names,
            first=first_replica,
            num_replicas=self._num_replicas,
        )
        self.admission = Admission.of(config, self.metrics, self.accounts, shared.quotas)
        self.hub = Hub(
            core, self.metrics, self.admission, shared.jobs.answers, self.adapters.model_name, ids, first_replica
        )
        shared.reloader.add(self.admission.limit)
        shared.reloader.add(lambda settings: core.set_log_level(settings.log_level))
        self.failure: str | None = None
        """Why the model cannot be served; None while it can."""
        self._core = core
        self._loaded: ServedModel | None = None
        self._is_attached = False
        self._is_waking = False
        """Whether the starting core replaces one that was ended on purpose."""
        self._is_closing = False
        self._is_closed = False
        self._sleeping = asyncio.Lock()
        self.is_asleep = False
        """Whether an operator has put the model to sleep: until `wake_up`, live requests pause and new ones are
        refused."""

    async def load(self) -> None:
        """Load tokenizer and chat template while the core loads the model. On failure, set `failure` to the reason."""
        self.failure = None
        if not self._is_attached:
            self._is_attached = True
            loop = asyncio.get_running_loop()
            self._core.attach(loop, self.hub.receive, self._core_restarted, self._requests_moved)
        parsers = self.config.server_config.tool_call_parser, self.config.server_config.reasoning_parser
        try:
            AnswerFormat.check_names(*parsers)
        except ValueError as error:
            self.failure = str(error)
            return
        try:
            (tokenizer, template, defaults, pooling), self._weights, ready = await asyncio.gather(
                asyncio.to_thread(_load_text_side, self.config),
                asyncio.to_thread(_digest_of, self.config),
                self._ready_core(),
            )
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

    async def _ready_core(self) -> Ready:
        if self._core.is_asleep or self._core.failure is not None:
            await self._wake_core()
        return await self._core.wait_ready_async()

    @property
    def fingerprint(self) -> str:
        """Digest of weights, kernels and mode. Servers with equal fingerprints that end in `invariant` give equal
        greedy and seeded answers."""
        ready = self._core.ready
        if self._weights is None or ready is None:
            return f"kaon-{self._version}"
        mode = "invariant" if ready.model.is_invariant else "batched"
        return f"kaon-{self._version}-{self._weights}-{ready.model.kernels}-{mode}"

    async def unload(self) -> None:
        """Free all memory of the model until `load`. Live requests pause."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.grammars.close()
        await self._core.sleep(2)

    def open(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: GenerationDefaults,
        pooling: PoolingConfig | None = None,
    ) -> None:
        """Accept requests for the loaded model. Raises `ValueError` for an unknown parser.

        `pooling` describes how the model pools prompts; None if it does not.
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
        self._loaded = ServedModel(
            processor,
            AnswerFormat.of_model(tokenizer, template, model.architecture, *parsers),
            grammars,
            model.max_model_len,
            None if pooling is None else PoolingProcessor(processor, pooling),
        )

    def drain(self) -> None:
        """Refuse new requests; live ones continue."""
        self._is_closing = True

    def close(self) -> None:
        """Refuse new requests and end the live ones with an error."""
        self.drain()
        self._is_closed = True
        self.hub.fail_all(ShuttingDown(SHUTTING_DOWN))
        if self._loaded is not None:
            self._loaded.grammars.close()
        self.jobs.close()

    @property
    def why_ended(self) -> str | None:
        """A sentence that says why the model cannot be served any more; None while it can."""
        if self.failure is None and self._core.failure is not None:
            return self._core.failure.error
        return self.failure

    @property
    def loaded(self) -> ServedModel:
        """The loaded model. Raises `NotReady` unless requests can be served."""
        if self._is_closing:
            raise ShuttingDown(SHUTTING_DOWN)
        if self.why_ended is not None:
            raise NotReady(f"the server cannot serve: {self.why_ended}")
        if self._loaded is None:
            raise NotReady("the model is still loading; try again in a moment")
        if self.is_asleep:
            raise NotReady("the server sleeps; an operator wakes it with POST /wake_up")
        return self._loaded

    async def sleep(self, level: int) -> None:
        """Free memory: pause live requests and refuse new ones. It continues if the caller is cancelled.

        Raises an `ApiError`.
        """
        await asyncio.shield(asyncio.ensure_future(self._sleep(level)))

    async def _sleep(self, level: int) -> None:
        async with self._sleeping:
            if not self.is_asleep:
                self.check_ready()
                self.is_asleep = True
                await self._core.sleep(level)

    async def wake_up(self) -> None:
        """Continue live requests and accept new ones. It continues if the caller is cancelled.

        A server that drains wakes up, so that its paused requests can end. Raises `ShuttingDown` if they have ended,
        and `NotReady` if the engine cannot be started again.
        """
        await asyncio.shield(asyncio.ensure_future(self._wake_up()))

    async def _wake_up(self) -> None:
        async with self._sleeping:
            if self._is_closed:
                raise ShuttingDown(SHUTTING_DOWN)
            if self.is_asleep:
                self.is_asleep = False
                try:
                    await self._wake_core()
                except EngineDeadError as error:
                    raise NotReady(f"the server cannot serve: {error}") from error

    async def update_weights(self, path: str, *, alongside: bool | None = None) -> Path:
        """Replace the weights by the checkpoint in the directory `path`. Returns its resolved path.

        `alongside`: whether old and new weights are in memory together meanwhile; None: if the memory seems to
        suffice. It continues if the caller is cancelled. Raises an `ApiError`, and then nothing has changed.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update_weights(path, alongside)))

    async def _update_weights(self, path: str, alongside: bool | None) -> Path:
        async with self._sleeping, self.adapters.unchanged():
            directories = [Path(each).resolve() for each in self.config.server_config.weights_directories]
            if not directories:
                raise PathNotAllowed(
                    "this server replaces no weights while it runs; start it with --weights-directories DIRECTORY",
                    param="model_path",
                )
            found = await allowed_directory(path, directories, param="model_path", setting="weights_directories")
            if found is None:
                raise BadRequest(f"model_path is {path[:200]!r}, which is not a directory", param="model_path")
            self.check_ready()
            try:
                size = await asyncio.to_thread(_check_replacement, resolve_checkpoint(self.config.model), found)
                began = time.monotonic()
                self._is_waking = True
                await self._core.update_weights(str(found), size, alongside=alongside)
                self._weights = await asyncio.to_thread(weights_digest, found)
            except EngineDeadError as error:
                raise NotReady(f"the server cannot serve: {error}") from error
            except WeightsError as error:
                sentence = f"the present weights stay in use: {error}"
                if error.is_temporary:
                    raise NotReady(sentence) from error
                raise BadRequest(sentence, param="model_path") from error
            except (ValueError, OSError) as error:
                raise BadRequest(f"the present weights stay in use: {error}", param="model_path") from error
            finally:
                self._is_waking = False
            _log.warning("the weights of %s are served now, after %.1f s", found, time.monotonic() - began)
            return found

    async def _wake_core(self) -> None:
        self._is_waking = True
        try:
            await self._core.wake_up()
        finally:
            self._is_waking = False

    def _core_restarted(self, resumed: int, replica: int) -> None:
        self.hub.core_restarted(resumed, replica, died=not self._is_waking)

    def _requests_moved(self, resumed: int, replica: int) -> None:
        self.metrics.requests_moved(resumed, self._first_replica + replica)

    def check_loaded(self) -> None:
        """Raise `NotReady` unless requests are accepted; they may have to wait for a restart of the engine."""
        _ = self.loaded

    def check_ready(self) -> None:
        """Raise `NotReady` unless a new request would be served at once."""
        self.check_loaded()
        if not self._core.is_serving:
            raise NotReady("the engine is being started again; requests wait for it")

    @property
    def max_request_bytes(self) -> int:
        """Largest request body for this model in bytes: the setting or, by default, enough for a full context."""
        limit = self.config.server_config.max_request_bytes
        if limit is not None:
            return limit
        needed = _BODY_BYTES_PER_TOKEN * (self.max_model_len or 0)
        return min(max(needed, _LEAST_BODY_LIMIT), _MOST_BODY_LIMIT)

    @property
    def max_request_bytes_once_loaded(self) -> int:
        """As `max_request_bytes`; while the model is not loaded, the most that it may be once the model is."""
        is_known = self.config.server_config.max_request_bytes is not None or self.max_model_len is not None
        return self.max_request_bytes if is_known else _MOST_BODY_LIMIT

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
        """Return the pooling processor if the model serves one of `tasks`. Raises `WrongTask` otherwise."""
        pooling = self.loaded.pooling
        if pooling is not None and pooling.pooling.task in tasks:
            return pooling
        what = "generates text" if pooling is None else f"serves {_ENDPOINTS_OF[pooling.pooling.task]}"
        needed = " or ".join(tasks)
        raise WrongTask(
            f"the model of this server {what}; this endpoint needs one that is served to {needed} (--task {tasks[0]})",
            param="model",
        )


_VOCABULARIES = ("tokenizer.model", "tiktoken.model", "hy.tiktoken", "tekken.json", "vocab.json", "merges.txt")
"""Files of which a tokenizer is made if there is no tokenizer.json, which is complete alone."""


def _check_replacement(present: Path, new: Path) -> int:
    """Check that a checkpoint is complete and has the same tokenizer. Returns the bytes of its weights.

    Raises `ValueError` with a sentence. The engine checks shapes and names of tensors itself; the errors found here
    would otherwise appear only after the engine was ended and started.
    """
    vocabularies = (
        ("tokenizer.json",) if (present / "tokenizer.json").is_file() else ("tokenizer.json", *_VOCABULARIES)
    )
    for name in ("config.json", *vocabularies):
        if (present / name).is_file() != (new / name).is_file():
            raise ValueError(f"only one of {present} and {new} has {name}; both must have it, or neither")
    changed = [
        name
        for name in vocabularies
        if (new / name).is_file() and (new / name).read_bytes() != (present / name).read_bytes()
    ]
    if vocabularies[1:] and _added_tokens(new) != _added_tokens(present):
        changed.append("added_tokens_decoder")
    if changed:
        raise ValueError(
            f"{changed[0]} of {new} is not that of the model; weights can be replaced, vocabularies cannot"
        )
    files = list(new.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not a file; copy the checkpoint again")
        read_header(file)
    return sum(file.stat().st_size for file in files)


def _added_tokens(checkpoint: Path) -> object:
    """Return the tokens that tokenizer_config.json adds to a vocabulary, by their ids."""
    return read_json_object(checkpoint / "tokenizer_config.json").get("added_tokens_decoder")


def _digest_of(config: Config) -> str:
    return weights_digest(resolve_checkpoint(config.model))


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
