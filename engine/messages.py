"""Typed messages between the front end (`CoreManager`) and the engine core; msgpack by msgspec, never pickle.

To the core: `Inbound`. From the core: `Outbound`, one `StepOutputs` an engine step.
"""

import operator
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

import msgspec

from engine.sampling_params import SamplingParams


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities (natural, of the unmodified distribution) at one position."""

    token_id: int
    logprob: float
    top_ids: list[int] = []
    """The top-k tokens in descending order; k is what the request asked for."""
    top_logprobs: list[float] = []
    rank: int = 0
    """The token's rank by probability, from 1; 0: unknown."""


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wanted of a prompt that is pooled: one vector, and no token."""

    dimensions: int | None = None
    """Leading elements of the vector that are kept (Matryoshka); None: all."""
    activate: bool = True
    """Apply the model's last function: to unit length for embeddings, to probabilities for classes."""
    first_text_tokens: int | None = None
    """Number of tokens of the first text of a pair, for models that embed both texts differently; None: one text."""


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """The tokens that one engine step sampled for one request. A request's last output has `finished` set.

    `finish_reason` is the engine's: `eos`, `max_tokens`, `stop_sequence`, `stop_{token_id}`, `grammar` (no token may
    follow), `pooled` (then `vector` is set), `abort` or `error` (then `error` has the reason); `openai_finish_reason`
    translates it.
    """

    request_id: int
    output_tokens: list[int]
    finished: bool = False
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    queue_time: float | None = None
    """Seconds from the core's receipt to the first scheduled step; on a request's first output only."""
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of the prompt's tokens after the first; on the first output, if the request asks for them."""
    bad_request: bool = False
    """With `error`: the request is at fault, not the engine."""
    is_poison: bool = False
    """With `error`: computing the request broke the engine, and would again."""
    time: float | None = None
    """When the tokens were read from the device. On the wire: seconds since `AddRequest.sent_time`; the front end's
    journal makes it a time on its `time.monotonic` clock. None where no step brought the output."""
    vector: bytes | None = None
    """The vector of a request that pools its prompt, as little-endian float32."""


def terminal_output(
    request_id: int, reason: str, error: str | None = None, *, bad_request: bool = False, is_poison: bool = False
) -> RequestOutput:
    """The last output of a request that ends without another token; `error` is the sentence that its client gets."""
    return RequestOutput(
        request_id,
        [],
        finished=True,
        finish_reason=reason,
        error=error,
        bad_request=bad_request,
        is_poison=is_poison,
    )


def openai_finish_reason(leave_reason: str | None) -> str | None:
    """OpenAI's name for an engine finish reason: `length` for `max_tokens`, `stop` for every kind of stop."""
    if leave_reason is None:
        return None
    if leave_reason in ("abort", "error"):
        return leave_reason
    return "length" if leave_reason == "max_tokens" else "stop"


class AddRequest(msgspec.Struct, tag="add"):
    """One sequence to run. The front end chooses its id, which is unique in the life of a core."""

    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Start of the prefix-hash chain; requests of different salts never share blocks. None: the common chain."""
    priority: int = 0
    """Lower is served first."""
    adapter: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of a LoRA adapter, from 1 in the order of `Config.lora` and then of loading; 0: the base model alone."""
    resumed_token_ids: list[int] = []
    """Tokens that the sequence generated in a core that died; it continues after them."""
    suspect: bool = False
    """It was in the step in which the last core died: it is computed alone in its first step."""
    owner: str = ""
    """The party among which the scheduler shares its time fairly."""
    pooling: PoolingParams | None = None
    """Pool the prompt to a vector, and generate nothing; `sampling_params` then has a `max_tokens` of 0."""
    weight: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """How many times the tokens of an owner of weight 1 its owner gets."""
    shares_tables: bool = False
    """Its `sampling_params` lack their tables, which are those of the message before it: see `share_tables`."""
    sent_time: float = 0.0
    """When the front end sent it, on that host's `time.monotonic` clock; set by the journal."""


class AbortRequests(msgspec.Struct, tag="abort"):
    """End these sequences and free their blocks. Unknown or finished ids are ignored."""

    request_ids: list[int]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Abort all sequences, answer `Stopped`, and exit."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Attach a LoRA adapter between two steps, and answer `AdapterChanged`. A number that is attached is left so."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    """Never used before for another adapter: cached prefixes are found by it."""
    name: str
    path: str
    """Its directory, on every host that has a rank."""
    at_once: bool = False
    """Before the messages that follow; otherwise its files are read while steps run."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Remove an adapter that no live sequence uses, and answer `AdapterChanged`."""

    number: int


class ReleaseCache(msgspec.Struct, tag="release_cache", frozen=True):
    """Forget all cached prefixes, give the KV cache's memory on the host back to the system until a step needs it, and
    answer `CacheReleased`.

    No sequence may be live but those whose aborts were sent before.
    """


class SetLogLevel(msgspec.Struct, tag="log_level", frozen=True):
    """Log from this level on."""

    level: str


Inbound: TypeAlias = AddRequest | AbortRequests | Shutdown | LoadAdapter | UnloadAdapter | ReleaseCache | SetLogLevel

_TABLES = ("logit_bias", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "bad_words", "grammar")
"""Sampling parameters that may have thousands of entries, and that all choices of a request have in common."""
_NO_TABLES = dict.fromkeys(_TABLES)


def _tables_of(params: SamplingParams) -> list[object]:
    return [getattr(params, name) for name in _TABLES]


def share_tables(messages: Iterable[Inbound]) -> Iterator[Inbound]:
    """The messages of one sending, in which tables that successive requests have in common are sent once.

    Tables are common where they are the same objects, as they are for all choices of a request.
    """
    before: SamplingParams | None = None
    for message in messages:
        if not isinstance(message, AddRequest):
            yield message
            continue
        params, previous = message.sampling_params, before
        before = params
        tables = _tables_of(params)
        if previous is None or not any(tables) or any(map(operator.is_not, tables, _tables_of(previous))):
            yield message
        else:
            bare = msgspec.structs.replace(params, **_NO_TABLES)
            yield msgspec.structs.replace(message, sampling_params=bare, shares_tables=True)


def take_tables(message: AddRequest, previous: SamplingParams | None) -> None:
    """Give a decoded message that shares tables those of the message before it. Raises `ValueError` without one."""
    if message.shares_tables:
        if previous is None:
            raise ValueError("shares_tables is set, but no request was sent before this one in the same message")
        for name in _TABLES:
            # The parameters are frozen, and were checked as part of the other message.
            msgspec.structs.force_setattr(message.sampling_params, name, getattr(previous, name))


class ModelInfo(msgspec.Struct, frozen=True):
    """Properties of the loaded model that the front end needs."""

    architecture: str
    dtype: str
    device: str
    attention_backend: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    block_size: int
    num_kvcache_blocks: int
    own_cpus: list[int] = []
    """CPUs that the engine reserves; none where it shares all of them."""
    shares_prefixes: bool = True
    """Whether requests with equal prefixes share blocks."""
    kernels: str = ""
    """Hexadecimal digits that name what computes the model, and how: equal where nothing that rounds differs."""
    is_invariant: bool = False
    """Whether greedy and seeded answers depend on nothing else that the engine computes."""


class Ready(msgspec.Struct, tag="ready"):
    """The core has loaded the model and produced a token."""

    model: ModelInfo
    startup_seconds: dict[str, float]
    """Seconds spent by phase: import, load, warm-up."""


class Failed(msgspec.Struct, tag="failed"):
    """The core cannot continue; `error` is a sentence for a person. `usage` marks a mistake of the user, not a fault.

    `killed`: another process killed one of its ranks. `collateral`: it ends because another replica did with which it
    computes in lockstep, and none of its requests is the cause.
    """

    error: str
    usage: bool = False
    killed: bool = False
    collateral: bool = False


class SchedulerStats(msgspec.Struct, array_like=True):
    """Gauges after a step, and counters since the core started."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    prefill_tokens: int
    """Prompt tokens computed, without prefix hits."""
    step_kind: str
    """Kind of the step just read: `prefill`, `decode`, `mixed`, or `idle` for a message without a step."""
    step_seconds: float
    """Duration of the step just read, from its launch, or the end of the step before it, until it was read."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    device_memory: int = 0
    """Bytes of its device's memory that the core's process holds; 0 on a CPU, whose memory is the process's."""
    device_memory_total: int = 0
    """Bytes of that device's memory; 0 on a CPU."""
    num_drafts: int = 0
    """Times that a step verified drafts of a sequence."""
    accepted_by_position: tuple[int, ...] = ()
    """Of the first, second, ... drafts, how many were accepted."""
    sentinel_checks: int = 0
    """Served results that were computed again by torch and compared."""
    sentinel_mismatches: int = 0
    """Those that rounding does not explain."""


class StepOutputs(msgspec.Struct, tag="step"):
    """All outputs of one engine step."""

    outputs: list[RequestOutput]
    stats: SchedulerStats | None = None
    replica: int = 0
    """The replica that it comes from; filled in by the front end."""
    preempted: list[int] = []
    """Ids of requests that were preempted since the message before."""


class AdapterChanged(msgspec.Struct, tag="adapter", frozen=True):
    """The answer to `LoadAdapter` and `UnloadAdapter`."""

    number: int
    error: str | None = None
    """Why it could not be done, as a sentence; nothing has changed then."""


class CacheReleased(msgspec.Struct, tag="cache_released", frozen=True):
    """The answer to `ReleaseCache`."""


class Stopped(msgspec.Struct, tag="stopped"):
    """The core has aborted all sequences and exits."""


Outbound: TypeAlias = Ready | Failed | StepOutputs | AdapterChanged | CacheReleased | Stopped
