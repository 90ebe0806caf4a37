"""`Config` and its sections: every setting, typed, checked and frozen.

The command line, `KAON_*` variables, YAML files and docs/configuration.md derive from the fields and their docstrings.
Sections are flat outside Python (`--port`, `KAON_PORT`, `port:`), so a field's name is unique across all sections;
`engine.config.settings` checks this when it builds the command line.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from engine.config.section import Section
from engine.config.server import ServerConfig
from models.architectures.registry import DRAFTERS
from models.quantization.config import METHODS, ROUNDINGS

__all__ = [
    "CLUSTER_KEY_ENV",
    "EMBEDDED_MODEL_NAME",
    "CompilationConfig",
    "Config",
    "ParallelConfig",
    "PrecisionConfig",
    "SpeculativeConfig",
]


# Processes, devices and hosts.

_MAX_PORT = 65535
CLUSTER_KEY_ENV = "KAON_CLUSTER_KEY"
"""Environment variable of the key by which hosts authenticate each other; not a setting, because other users of the
machine can see flags."""


class ParallelConfig(Section):
    """How the model is spread over processes and devices."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes (ranks) that share each layer: one for each GPU, or for each part of the CPU's cores."""

    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Replicas: engine cores that each hold the whole model and a KV cache, and answer different requests."""

    data_parallel_placement: Literal["prefix", "round_robin"] = "prefix"
    """How a request is assigned to a replica: `prefix` weighs load against cached prefixes, `round_robin` takes
    turns."""

    enable_expert_parallel: bool = False
    """Place whole experts on different ranks, of all replicas, instead of a part of every expert on each rank.

    Replicas that share experts compute their steps in lockstep."""

    cpu_collectives: Literal["shared_memory", "gloo"] = "shared_memory"
    """Collectives of ranks and replicas on the CPU: through shared memory, or by torch's Gloo, which is slower."""

    rank_start_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds that a rank may need to load after the first rank has loaded, and to connect to the others."""

    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    """What starts the ranks: `mp` this host, and with `nnodes` each host its own; `ray` the Ray cluster of this
    host."""

    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy: few nodes if possible, many if possible, one node only, or one node for each rank."""

    nnodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of hosts among which the replicas are divided, or with one replica its ranks.

    Start each host with the same settings except `node_rank`."""

    node_rank: Annotated[int, Field(ge=0, lt=64)] = 0
    """Number of this host, from 0. Host 0 serves HTTP; the others run ranks or replicas for it."""

    master_addr: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address at which the other hosts reach host 0."""

    master_port: Annotated[int, Field(ge=1, le=65533)] = 29500
    """First port at which the other hosts reach host 0. Ranks also use the next two ports; replica r uses port + r,
    and replicas that exchange tokens use the two ports after the last replica's."""

    cluster_interface: Annotated[str, Field(min_length=1)] | None = None
    """Network interface of this host for collectives between hosts, such as wg0; default: the interface of its
    route to `master_addr`."""

    cluster_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the key by which hosts authenticate each other, instead of `KAON_CLUSTER_KEY`; without a key, only
    loopback addresses work."""

    @model_validator(mode="after")
    def _ranks_fit_hosts(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank is {self.node_rank}, but there are {self.nnodes} hosts (nnodes); number them from 0"
            )
        if self.data_parallel_size == 1 and self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.tensor_parallel_size} ranks "
                "(tensor_parallel_size); each host must have the same number of ranks"
            )
        if self.data_parallel_size > 1 and self.data_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.data_parallel_size} replicas "
                "(data_parallel_size); each host must have the same number of replicas, with all their ranks"
            )
        if self.in_lockstep and self.distributed_executor_backend == "ray":
            raise ValueError(
                f"distributed_executor_backend is ray, but with enable_expert_parallel the {self.data_parallel_size} "
                "replicas (data_parallel_size) exchange tokens, for which each host is started by itself (nnodes); or "
                "distribute the experts over ranks (tensor_parallel_size)"
            )
        num_ports = self.data_parallel_size + 2 * self.in_lockstep
        if self.has_remote_replicas and self.master_port + num_ports - 1 > _MAX_PORT:
            also = ", and two more to exchange tokens (enable_expert_parallel)" if self.in_lockstep else ""
            raise ValueError(
                f"master_port is {self.master_port}, but each of {self.data_parallel_size} replicas "
                f"(data_parallel_size) needs a port of its own from there on{also}; set it to at most "
                f"{_MAX_PORT + 1 - num_ports}"
            )
        if self.distributed_executor_backend == "ray" and self.nnodes > 1:
            raise ValueError(
                f"nnodes is {self.nnodes}, but distributed_executor_backend is ray, which knows its hosts itself; "
                "leave nnodes out"
            )
        return self

    @field_validator("master_addr")
    @classmethod
    def _is_one_address(cls, master_addr: str) -> str:
        try:
            is_any = ip_address(master_addr).is_unspecified
        except ValueError:
            is_any = False  # A name.
            try:
                master_addr.encode("idna")
            except UnicodeError as error:
                raise ValueError(f"master_addr is {master_addr}, which is not a host name: {error}") from error
        if is_any:
            raise ValueError(
                f"master_addr is {master_addr}; name the one address by which the other hosts reach host 0"
            )
        return master_addr

    @model_validator(mode="after")
    def _experts_are_spread_over_several(self) -> Self:
        if self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel is set, but there is one rank to hold the experts; raise tensor_parallel_size "
                "or data_parallel_size too"
            )
        return self

    @property
    def in_lockstep(self) -> bool:
        """Whether replicas compute in lockstep, because their layers exchange tokens."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def has_remote_replicas(self) -> bool:
        """Whether other hosts run replicas; all ranks of a replica are then on one host."""
        spans_hosts = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return spans_hosts and self.data_parallel_size > 1

    @property
    def has_remote_ranks(self) -> bool:
        """Whether other hosts run ranks of the only replica."""
        spans_hosts = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return spans_hosts and self.data_parallel_size == 1


# The model and its computation.

EMBEDDED_MODEL_NAME = "kaon-demo"


class CompilationConfig(Section):
    """How the model's forward pass is compiled or captured."""

    compilation_level: Literal[0, 3] = 0
    """0: no compilation; 3: `torch.compile` compiles the decoder layers, except attention."""

    enforce_eager: bool = False
    """Run all decode steps on a GPU eagerly, without captured graphs."""

    capture: Literal["start", "behind"] = "start"
    """When graphs of decode steps are captured on a GPU: `start`: before the server is ready; `behind`: between steps
    and while idle, the smallest first."""

    piecewise_capture_tokens: int = Field(default=512, ge=0, le=1024)
    """On a GPU, steps with prompts of up to this many tokens replay graphs of all but attention; 0: they run eagerly.
    """

    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = ()
    """Batch sizes for which graphs are captured; default: 1, 2, 4, 8 and multiples of 16, up to `max_num_seqs` or
    512."""


_ZMQ_ADDRESS = r"^tcp://(\*|[^\s*]+):[0-9]{1,5}$"


if TYPE_CHECKING:
    SpeculativeMethod: TypeAlias = str
else:
    SpeculativeMethod = Literal[("ngram", *DRAFTERS.names())]


class SpeculativeConfig(Section):
    """Speculative decoding: where draft tokens come from, and how many a step verifies."""

    num_speculative_tokens: Annotated[int, Field(ge=0, le=16)] = 4
    """Most draft tokens that a decode step verifies for a sequence; setting any of these options enables drafts; 0: no
    drafts. Off by default, except that on a CPU the embedded model has 3 drafts of its own head."""

    speculative_method: SpeculativeMethod = "ngram"
    """Source of drafts. `ngram`: the tokens that followed an earlier occurrence of the sequence's last tokens; any
    other: a model (docs/speculative.md)."""

    speculative_model: str | None = None
    """Checkpoint of the model that drafts: a directory or a hub id. By itself it means the method `draft`."""

    speculative_acceptance: Literal["coupled", "rejection"] = "coupled"
    """How drafts of a model are accepted if the temperature is above 0. `coupled`: a draft is accepted if the target
    samples the same token with the same noise, so that answers equal those without drafts. `rejection`: by rejection
    sampling, which accepts more drafts and gives other answers of the same distribution; for `ngram` the two are
    equal."""

    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] = 3
    """Fewest last tokens that must have occurred earlier in the sequence for `ngram` to draft."""

    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 16
    """Most last tokens that `ngram` compares: of several earlier occurrences it uses the longest match."""

    @property
    def drafts_by_model(self) -> bool:
        """Whether the runner drafts with a model; otherwise the scheduler drafts."""
        return self.speculative_method != "ngram"

    @model_validator(mode="before")
    @classmethod
    def _model_means_a_draft_model(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("speculative_model") is not None:
            return {"speculative_method": "draft", **fields}
        return fields

    @model_validator(mode="after")
    def _method_and_model_agree(self) -> Self:
        if self.speculative_model is not None and not self.drafts_by_model:
            raise ValueError(
                f"speculative_model is {self.speculative_model}, but speculative_method is ngram, which needs none; "
                f"set speculative_method to one of {', '.join(DRAFTERS.names())}"
            )
        return self

    @model_validator(mode="after")
    def _shortest_is_no_longer_than_longest(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_max is {self.prompt_lookup_max}, but prompt_lookup_min is {self.prompt_lookup_min}; "
                "set both, the second no larger than the first"
            )
        return self


if TYPE_CHECKING:
    Quantization: TypeAlias = str
else:
    Quantization = Literal[("auto", *ROUNDINGS, "none", *METHODS.names())]


class PrecisionConfig(Section):
    """How weights and the KV cache are stored."""

    quantization: Quantization = "auto"
    """`auto`: as the checkpoint stores them; `int8`, `int4`, `mxfp4`: quantised while loading, on a CPU; any other
    value, and `mxfp4` for a quantised checkpoint: the method that the checkpoint must have."""

    kv_cache_dtype: Literal["auto", "bfloat16", "bf16", "fp8", "fp8_e4m3"] = "auto"
    """Type of cached keys, values and latents: `auto` is the model's; `fp8` takes half of bfloat16's memory and is
    less exact."""


class KVEventsConfig(Section):
    """Events of the KV cache for routers outside of the server, in vLLM's wire format (docs/deploy/routers.md)."""

    kv_events_endpoint: Annotated[str, Field(pattern=_ZMQ_ADDRESS)] | None = None
    """ZMQ address of a PUB socket for block events, which hold prompts: `tcp://*:5557` listens, `tcp://HOST:PORT`
    connects; replica N uses the port plus N. Default: no events."""

    kv_events_replay_endpoint: Annotated[str, Field(pattern=_ZMQ_ADDRESS)] | None = None
    """ZMQ address at which subscribers request events that they missed, for example `tcp://*:5657`."""

    kv_events_topic: str = ""
    """Topic of the events; llm-d expects `kv@POD@MODEL`."""

    kv_events_format: Literal["array", "map"] = "array"
    """Form of an event: an array of its fields, which routers decode in every release, or a map by their names, which
    vLLM publishes since June 2026 and its own classes decode."""

    @model_validator(mode="after")
    def _replay_needs_events(self) -> Self:
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ValueError("kv_events_replay_endpoint is set, but kv_events_endpoint is not; set it too")
        return self


class Config(Section):
    """Master configuration of one server or one `LLMEngine`.

    `num_kvcache_blocks`, `max_model_len` and the token ids below are known only once the checkpoint is read and
    memory is measured: the engine core fills them in a copy (`model_copy(update=...)`), never in place.
    """

    model: str | None = None
    """Checkpoint directory or Hugging Face hub id; default: the embedded demo model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the model computes; `auto` is the checkpoint's."""

    model_impl: Literal["auto", "kaon", "transformers"] = "auto"
    """Implementation of the model: `kaon`, `transformers`, or `auto`: Kaon's where it has the architecture."""

    task: tuple[Literal["generate", "embed", "classify"], ...] = ()
    """Tasks that the model is served for, as `generate,embed`; default: those of its checkpoint, else `generate`."""

    matryoshka: Literal["auto", "on", "off"] = "auto"
    """Whether embeddings may be truncated to fewer `dimensions`; `auto`: as the checkpoint specifies."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto`: a GPU for which there is an attention backend, else the CPU; `cuda` includes
    ROCm."""

    kernel_backend: tuple[Annotated[str, Field(min_length=1)], ...] = ("auto",)
    """Library that computes on a GPU: `auto`, `triton`, `torch` or `aiter`, for all operators, or for one:
    `norm=torch`."""

    batch_invariant: bool = False
    """Make answers on GPUs independent of other requests, which costs time. With Kaon's operators on a CPU, they are
    without this setting. The start fails where they would not be."""

    sentinel_interval: Annotated[int, Field(ge=0)] | None = None
    """Decode steps after which one row of a step is computed again by plain torch and compared; 0: never; default:
    4096 on GPUs, 0 on a CPU."""

    generation_config: Annotated[str, Field(min_length=1)] = "auto"
    """Sampling defaults: `auto` reads the checkpoint's generation_config.json, `none` uses OpenAI's; or a
    directory that has such a file."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of requests that have no seed, combined with a counter of requests."""

    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a prompt and its completion together; default: the checkpoint's context length."""

    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 512
    """Most sequences that run at a time."""

    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 16384
    """Most tokens that one step computes; a longer prompt is prefilled in chunks of at most this size."""

    scheduling_policy: Literal["prefill_first", "mixed"] = "prefill_first"
    """`prefill_first` schedules waiting prompts before any decode; `mixed` schedules decodes first and fills the
    step with chunks of prompts."""

    max_step_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] | None = None
    """Approximate bound of a step's duration in seconds; running streams wait at most twice as long, for any load.

    Default: 0.75 on CPUs, more where a step has large fixed costs; 0 on GPUs, which bounds steps by tokens alone."""

    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Whether a step is scheduled and launched before the tokens of the previous one are read; `auto`: on GPUs."""

    scheduler_delay_factor: Annotated[float, Field(ge=0.0)] = 0.0
    """Delay prefills by this multiple of the last prefill's latency, so that prompts are batched; 0: no delay."""

    priority_aging_seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 10.0
    """Seconds of waiting that count as much as one level of a request's `priority`; 0 ignores priorities."""

    kv_cache_block_size: int = 16
    """Tokens in a KV-cache block: a multiple of 16, or 1."""

    num_kvcache_blocks: Annotated[int, Field(ge=1)] | None = None
    """Number of KV-cache blocks; default: as many as fit `gpu_memory_utilization` or `cpu_kvcache_gib`."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Fraction of a GPU's memory that weights, activations and the KV cache may use together."""

    cpu_kvcache_gib: Annotated[float, Field(gt=0.0, le=2**20)] | None = None
    """Size of the KV cache on a CPU, in GiB; default: a quarter of the available memory, at most 4 GiB and 524288
    tokens."""

    cpu_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads that compute on a CPU; default: one for each physical core of one NUMA node, less one from four
    cores on."""

    cpu_isa: Literal["auto", "portable", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"] = (
        "auto"
    )
    """Instruction set of the compiled operators on a CPU; `auto`: the fastest that the processor runs."""

    cpu_operators: bool = True
    """Compute bfloat16 on a CPU by Kaon's compiled operators, where they were built; otherwise torch computes."""

    pack_cache: bool = True
    """Keep a model's packed weights in `~/.cache/kaon`, from which the next start on a CPU maps them."""

    pack_cache_gib: Annotated[float, Field(gt=0)] = 32.0
    """Most GiB of all packed weights there; the least recently used ones are deleted first."""

    enable_prefix_caching: bool = True
    """Share KV blocks between requests whose prompts begin with the same tokens."""

    bos_token_id: Annotated[int, Field(ge=0)] | None = None
    """Beginning-of-sequence token, which replaces an empty prompt; default: the checkpoint's."""

    eos_token_id: Annotated[int, Field(ge=0)] | None = None
    """End-of-sequence token; default: the checkpoint's."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further tokens that end a completion; default: the other EOS tokens of the generation config."""

    max_core_restarts: Annotated[int, Field(ge=0)] = 30
    """Most restarts of an engine core within `core_restart_window`; after them the server ends; 0: no restarts.

    Running requests continue in the new core after the tokens that they have."""

    core_restart_window: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds within which `max_core_restarts` are counted."""

    stall_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds without a completed step, while there is work, after which an engine core is restarted."""

    lora: tuple[str, ...] = ()
    """LoRA adapters to serve with the model, each NAME=DIRECTORY; a request selects one by its name as `model`."""

    parallel_config: ParallelConfig = ParallelConfig()
    compilation_config: CompilationConfig = CompilationConfig()
    speculative_config: SpeculativeConfig | None = None
    quantization_config: PrecisionConfig = PrecisionConfig()
    kv_events_config: KVEventsConfig = KVEventsConfig()
    server_config: ServerConfig = ServerConfig()

    @classmethod
    def from_fields(cls, **fields: Any) -> Self:
        """Create a configuration from its fields and its sections' fields by name: `tensor_parallel_size=2`.

        Raises `ValueError` for an invalid value, and if a section and one of its fields are both given.
        """
        own = {name: value for name, value in fields.items() if name in cls.model_fields}
        sections: dict[str, dict[str, Any]] = {}
        for name in fields.keys() - own.keys():
            section = _SECTION_OF.get(name)
            if section is None:
                own[name] = fields[name]  # Refused together with all other unknown fields.
            elif section in fields:
                raise ValueError(f"{section} and its field {name} are both given; give one of them")
            else:
                sections.setdefault(section, {})[name] = fields[name]
        return cls(**own, **sections)

    @field_validator("kv_cache_block_size")
    @classmethod
    def _block_size_fits_kernels(cls, value: int) -> int:
        if value != 1 and (value < 16 or value % 16):
            raise ValueError(f"kv_cache_block_size is {value}; it must be 1 or a multiple of 16")
        return value

    @field_validator("lora")
    @classmethod
    def _adapters_have_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for item in value:
            name, _, path = item.partition("=")
            if not name or not path:
                raise ValueError(f"lora is {item!r}; each item must be NAME=DIRECTORY")
            if not name.isprintable():
                raise ValueError(f"lora is {item!r}, whose name has a character that cannot be shown; leave it out")
            if sum(other.partition("=")[0] == name for other in value) > 1:
                raise ValueError(f"lora names two adapters {name}; each needs a name of its own")
        return value

    @model_validator(mode="after")
    def _adapters_are_not_named_like_the_model(self) -> Self:
        for name in self.lora_paths:
            if name in self.model_names:
                raise ValueError(f"lora names an adapter {name}, which is the model's own name; choose another")
        return self

    @model_validator(mode="after")
    def _replicas_have_ports_of_their_own(self) -> Self:
        events, count = self.kv_events_config, self.parallel_config.data_parallel_size
        publish, replay = events.kv_events_endpoint, events.kv_events_replay_endpoint
        if publish is None or replay is None or not publish.startswith("tcp://*:"):
            return self
        first, second = (int(each.rpartition(":")[2]) for each in (publish, replay))
        if abs(first - second) < count:
            raise ValueError(
                f"kv_events_replay_endpoint is {replay} and kv_events_endpoint {publish}, but each of {count} "
                "replicas (data_parallel_size) adds its number to both ports; let them lie "
                f"{count} or more apart"
            )
        return self

    @model_validator(mode="after")
    def _several_models_have_a_file(self) -> Self:
        server, parallel = self.server_config, self.parallel_config
        if server.models is None:
            return self
        if self.model is not None:
            raise ValueError(
                f"model is {self.model}, but models is {server.models}, which lists all models; give one of the two"
            )
        if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
            raise ValueError(
                f"models is {server.models}, whose engines run on one host; serve a model that spans hosts by itself "
                "(nnodes, distributed_executor_backend)"
            )
        if server.metrics_aliases != "none":
            raise ValueError(
                f"metrics_aliases is {server.metrics_aliases}, whose names describe one model, but models is "
                f"{server.models}; leave metrics_aliases out"
            )
        return self

    @property
    def num_drafts(self) -> int:
        """Most drafts of a sequence that a step verifies; 0 without speculative decoding."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def drafts_by_model(self) -> bool:
        """Whether a model drafts for the served one."""
        return self.speculative_config is not None and self.speculative_config.drafts_by_model

    @property
    def drafts_by_rejection(self) -> bool:
        """Whether drafts of a model are accepted by rejection sampling."""
        speculative = self.speculative_config
        return self.drafts_by_model and speculative is not None and speculative.speculative_acceptance == "rejection"

    @property
    def model_names(self) -> tuple[str, ...]:
        """Served names of the model, the main one first."""
        return self.server_config.served_model_name or (self.model or EMBEDDED_MODEL_NAME,)

    @property
    def lora_paths(self) -> dict[str, Path]:
        """Directory of each adapter by name. Adapters are numbered from 1 in this order."""
        parts = (item.partition("=") for item in self.lora)
        return {name: Path(path) for name, _, path in parts}


_SECTIONS: dict[str, type[Section]] = {
    "parallel_config": ParallelConfig,
    "compilation_config": CompilationConfig,
    "speculative_config": SpeculativeConfig,
    "quantization_config": PrecisionConfig,
    "kv_events_config": KVEventsConfig,
    "server_config": ServerConfig,
}
_SECTION_OF = {field: name for name, section in _SECTIONS.items() for field in section.model_fields}
