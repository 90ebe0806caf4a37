"""`Config` and its sections: every setting, typed, checked and frozen.

The command line, `KAON_*` variables, YAML files and docs/configuration.md derive from the fields and their docstrings.
"""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from models.quantization.config import METHODS, ROUNDINGS


class Section(BaseModel):
    """Base of `Config` and its sections: immutable, no unknown fields, no coercion surprises."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


# Processes, devices and hosts.

_MAX_PORT = 65535
CLUSTER_KEY_ENV = "KAON_CLUSTER_KEY"
"""The environment's name for the key that hosts know each other by: no setting, since flags can be seen by others."""


class ParallelConfig(Section):
    """How the model is spread over processes and devices."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that each layer is shared out over: one a GPU, or a part of the CPU's cores each."""

    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Engine cores that each hold the whole model and a KV cache, and answer requests of their own."""

    data_parallel_placement: Literal["prefix", "round_robin"] = "prefix"
    """Which of them computes a request: the least busy, and the one that has its beginning cached; or each in turn."""

    enable_expert_parallel: bool = False
    """Spread the experts of mixtures over all ranks of all replicas, whole, in place of a part of each on every rank.

    Replicas whose experts are spread compute in step."""

    cpu_collectives: Literal["shared_memory", "gloo"] = "shared_memory"
    """How ranks on the CPU add up, and replicas exchange tokens: in memory they share, or by torch, slower."""

    rank_start_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds that each rank may take longer than the first to load, and to meet the others."""

    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    """Who starts the ranks: `mp` this host, and others as `nnodes` says; `ray` the Ray cluster that it belongs to."""

    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's strategy: few nodes if possible, many if possible, one node only, or a node for each rank."""

    nnodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Hosts that the replicas, or the ranks of the only one, are shared out over.

    Each is started with the same settings, but for `node_rank`."""

    node_rank: Annotated[int, Field(ge=0, lt=64)] = 0
    """Number of this host; 0 serves HTTP, the others run their ranks or replicas for it."""

    master_addr: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of host 0, by which the others reach it."""

    master_port: Annotated[int, Field(ge=1, le=65533)] = 29500
    """First port of host 0 that the others connect to: also the next two, or with replicas the r-th next for r."""

    cluster_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File of the key that the hosts know each other by, in place of `KAON_CLUSTER_KEY`; no key: loopback only."""

    @model_validator(mode="after")
    def _ranks_fit_hosts(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank is {self.node_rank}, but there are {self.nnodes} hosts (nnodes); number them from 0"
            )
        if self.data_parallel_size == 1 and self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.tensor_parallel_size} ranks "
                "(tensor_parallel_size); each host has as many ranks as the others"
            )
        if self.data_parallel_size > 1 and self.data_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.data_parallel_size} replicas "
                "(data_parallel_size); each host has as many as the others, and all ranks of those it has"
            )
        if self.in_lockstep and self.has_remote_replicas:
            where = "distributed_executor_backend is ray" if self.nnodes == 1 else f"nnodes is {self.nnodes}"
            raise ValueError(
                f"{where}, but with enable_expert_parallel the {self.data_parallel_size} replicas "
                "(data_parallel_size) exchange tokens, which they do on one host in this release; spread the experts "
                "over ranks (tensor_parallel_size)"
            )
        if self.has_remote_replicas and self.master_port + self.data_parallel_size - 1 > _MAX_PORT:
            raise ValueError(
                f"master_port is {self.master_port}, but each of {self.data_parallel_size} replicas "
                f"(data_parallel_size) has a port behind it; set it to at most "
                f"{_MAX_PORT + 1 - self.data_parallel_size}"
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
                raise ValueError(f"master_addr is {master_addr}, which is no host's name: {error}") from error
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
        """Whether replicas compute in step: their layers exchange tokens."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def has_remote_replicas(self) -> bool:
        """Whether there are replicas that other hosts run; the ranks of each are on one host then."""
        spans_hosts = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return spans_hosts and self.data_parallel_size > 1

    @property
    def has_remote_ranks(self) -> bool:
        """Whether there are ranks of the only replica that other hosts run."""
        spans_hosts = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return spans_hosts and self.data_parallel_size == 1


# The HTTP server.

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
"""What may stand in a browser's `Origin` header, which is compared letter by letter."""


class ServerConfig(Section):
    """The HTTP face."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines, and needs an API key."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 lets the system choose one, which is printed."""

    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Model names that the API accepts and lists; default: the MODEL argument, `kaon-demo` for the embedded one."""

    allow_unknown_fields: bool = False
    """Ignore request fields that the API does not know, instead of answering 400."""

    max_tokens_overflow: Literal["clamp", "error"] = "clamp"
    """What becomes of a request whose `max_tokens` is beyond the room that its prompt leaves in the context: `clamp`
    lowers it to that room, because agents send one large number always; `error` answers 400."""

    max_request_bytes: Annotated[int, Field(ge=1024)] | None = None
    """Largest request body accepted, in bytes; over it the answer is 413.

    Default: 32 for each token of the context, at least 4 MiB, at most 32 MiB. A body holds a value for each 16."""

    max_stop_strings: Annotated[int, Field(ge=1)] = 4
    """Most stop strings a request may name (OpenAI's limit is 4)."""

    max_n: Annotated[int, Field(ge=1)] = 128
    """Most choices (`n`) a request may ask for (OpenAI's limit is 128)."""

    max_grammar_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**10
    """Largest JSON schema, regular expression or grammar of a request, in bytes."""

    max_stored_responses: Annotated[int, Field(ge=0)] = 1024
    """Most responses (`/v1/responses`) kept in memory; the least recently used makes room; 0 keeps none."""

    max_stored_response_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Most bytes that they keep, conversations and the events of running background responses included; over it, the
    owner that keeps most makes room."""

    max_background_responses_per_key: Annotated[int, Field(ge=1)] | None = None
    """Most background responses of one API key, or address, that run at a time; default: a quarter of
    `max_stored_responses`."""

    max_queued_requests: Annotated[int, Field(ge=1)] | None = None
    """Most sequences that wait for their first token, over which the answer is 429; default: `max_num_seqs`,
    of each replica."""

    max_queued_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most prompt tokens that they have together; default: as many as the KV caches of all replicas hold."""

    max_requests_per_key: Annotated[int, Field(ge=1)] | None = None
    """Most requests of one API key that are served at a time, over which the answer is 429; default: no limit."""

    request_timeout: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds that a request may take, waiting included, before it is ended; default: no limit."""

    stream_buffer_bytes: Annotated[int, Field(ge=1024)] = 2**20
    """Bytes of a stream, about, that are held for a client that reads slowly."""

    slow_readers: Literal["pause", "end"] = "pause"
    """What becomes of a request whose client leaves more unread: `pause` until it has read, or `end` with an error."""

    api_key: tuple[SecretStr, ...] = ()
    """Keys that requests must bring one of (`Authorization: Bearer ...`); with none, no request needs any.

    The environment or `api_key_file` are better places for them than a command line."""

    api_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File of further keys, one a line; empty lines, and what follows #, are left out."""

    insecure_no_auth: bool = False
    """Listen beyond loopback without API keys: everybody who reaches the port may use the model."""

    share_prefix_cache: bool = False
    """Share cached prefixes between API keys too; usage and timing then tell how others' prompts begin."""

    keyless_paths: tuple[Annotated[str, Field(pattern="^/")], ...] = (
        "/livez",
        "/readyz",
        "/health",
        "/ping",
        "/",
        "/favicon.ico",
        "/docs",
        "/openapi.json",
    )
    """Paths that need no key where all others do: probes, the first page, and the description of the API."""

    allowed_origins: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Origins whose pages may call this server from a browser (CORS), such as https://chat.example; * is any."""

    allowed_methods: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """Methods that those pages may use."""

    allowed_headers: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """Headers that those pages may send."""

    allow_credentials: bool = False
    """Let those pages send cookies and HTTP authentication of the browser's own."""

    ssl_certfile: Annotated[str, Field(min_length=1)] | None = None
    """PEM file of the server's certificate and its chain; turns https on."""

    ssl_keyfile: Annotated[str, Field(min_length=1)] | None = None
    """PEM file of the certificate's private key; default: it is in `ssl_certfile`."""

    ssl_ca_certs: Annotated[str, Field(min_length=1)] | None = None
    """PEM file of authorities; each client must then show a certificate that one of them signed."""

    drain_timeout: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that live requests have to end once the server is told to; what is left then ends with an error."""

    root_path: str = ""
    """Prefix under which a proxy shows this server, such as /llm; requests may come with it or without."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Jinja file to use in place of the checkpoint's chat template."""

    trust_request_chat_template: bool = False
    """Let requests bring chat templates of their own (`chat_template`), rendered in a process that can be killed."""

    tool_call_parser: Annotated[str, Field(min_length=1)] = "auto"
    """How the model writes tool calls: `auto` reads its chat template, `none`, or a name in docs/tool-calling.md."""

    reasoning_parser: Annotated[str, Field(min_length=1)] = "auto"
    """How the model writes reasoning: `auto` reads its chat template, `none`, or a name in docs/tool-calling.md."""

    access_log: Literal["text", "json", "none"] = "text"
    """How each request is logged when it has ended; probes and scrapes only at `log_level` debug."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_as_browsers_send_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins is {','.join(value)}; each item must be *, null, or a scheme and a host as in "
                    "https://chat.example, in small letters, with nothing behind but a port"
                )
        return value

    @field_validator("root_path")
    @classmethod
    def _root_path_is_a_prefix(cls, value: str) -> str:
        if value and (not value.startswith("/") or value.endswith("/")):
            raise ValueError(f"root_path is {value}; it must begin with / and not end with it")
        return value

    @model_validator(mode="after")
    def _credentials_go_to_named_origins(self) -> Self:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials is true, but allowed_origins is *; name the origins one by one")
        return self


# All settings. Sections are flat outside Python (`--port`, `KAON_PORT`, `port:`), so that leaf names are unique across
# sections; `engine.config.settings` checks this when it builds the command line.

__all__ = [
    "CLUSTER_KEY_ENV",
    "EMBEDDED_MODEL_NAME",
    "CompilationConfig",
    "Config",
    "ParallelConfig",
    "PrecisionConfig",
    "Section",
    "ServerConfig",
    "SpeculativeConfig",
]

EMBEDDED_MODEL_NAME = "kaon-demo"


class CompilationConfig(Section):
    """How the model's forward pass is compiled or captured."""

    compilation_level: Literal[0, 3] = 0
    """0 runs the model as it is; 3 has `torch.compile` compile its decoder layers between the calls of attention."""

    enforce_eager: bool = False
    """Never replay a GPU's decode steps from captured graphs."""

    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = ()
    """Batch sizes that graphs are captured for; default: 1, 2, 4, 8, and every 16th up to `max_num_seqs` or 512."""


class SpeculativeConfig(Section):
    """Speculative decoding: where draft tokens come from, and how many a step verifies."""

    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Draft tokens of a sequence that a decode step verifies at most; setting any of these turns drafts on."""

    speculative_method: Literal["ngram"] = "ngram"
    """`ngram` drafts what came next when a sequence's last tokens came before in it."""

    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] = 3
    """Last tokens that must have come before for `ngram` to draft."""

    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 16
    """Of several places where they came, `ngram` takes the one that matches most, up to so many tokens."""

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
    """`auto`: weights as they are; `int8`, `int4`: rounded as they are read, on a CPU; others: what they must be."""

    kv_cache_dtype: Literal["auto", "bfloat16", "bf16", "fp8", "fp8_e4m3"] = "auto"
    """Type of cached keys, values and latents; `auto` is the model's, `fp8` halves bfloat16's memory, less exact."""


class Config(Section):
    """Master configuration of one server or one `LLMEngine`.

    `num_kvcache_blocks`, `max_model_len` and the token ids below are known only once the checkpoint is read and
    memory is measured: the engine core fills them in a copy (`model_copy(update=...)`), never in place.
    """

    model: str | None = None
    """Hugging Face checkpoint directory or hub id; none serves the embedded demo model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the weights are computed in; `auto` takes the checkpoint's."""

    model_impl: Literal["auto", "kaon", "transformers"] = "auto"
    """Whose model code runs: `kaon`'s, transformers' own, or by default Kaon's where it has the architecture."""

    task: tuple[Literal["generate", "embed", "classify"], ...] = ()
    """What the model is served for, as `generate,embed`; default: as its checkpoint says, else `generate`."""

    matryoshka: Literal["auto", "on", "off"] = "auto"
    """Whether embeddings may be cut to fewer `dimensions`; `auto`: as the checkpoint says."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; `auto` takes a GPU (ROCm's are `cuda` in PyTorch) where an attention backend exists."""

    kernel_backend: tuple[Annotated[str, Field(min_length=1)], ...] = ("auto",)
    """What computes on a GPU: `auto`, `triton`, `torch` or `aiter`, for all or for one operator, as `norm=torch`."""

    generation_config: Annotated[str, Field(min_length=1)] = "auto"
    """Sampling defaults: `auto` is the checkpoint's generation_config.json, `none` OpenAI's; or a directory of one."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the requests that bring no seed of their own, together with a per-request counter."""

    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus completion in tokens; default: the checkpoint's context length."""

    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 512
    """Most sequences running at a time."""

    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 16384
    """Most tokens computed in one step; a longer prompt is prefilled in chunks of this size."""

    scheduling_policy: Literal["prefill_first", "mixed"] = "prefill_first"
    """`prefill_first`: waiting prompts before any decode; `mixed`: decodes first, prompt chunks fill the step."""

    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Schedule and submit each step before the last one's tokens are read; `auto`: on GPUs, with one rank."""

    scheduler_delay_factor: Annotated[float, Field(ge=0.0)] = 0.0
    """Hold prefills back for this many times the last prefill's latency, so that prompts batch up; 0 never waits."""

    priority_aging_seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 10.0
    """Seconds of waiting that a step of a request's `priority` weighs as much as; 0 ignores priorities."""

    kv_cache_block_size: int = 16
    """Tokens in a KV-cache block: a multiple of 16, or 1."""

    num_kvcache_blocks: Annotated[int, Field(ge=1)] | None = None
    """KV-cache blocks; default: as many as fit the memory set aside below."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory for weights, activations and KV cache together."""

    cpu_kvcache_gib: Annotated[float, Field(gt=0.0, le=2**20)] | None = None
    """KV-cache size on CPU in GiB; default: a quarter of what is available, at most 4 and at most 524288 tokens."""

    cpu_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads that compute on the CPU; default: one a physical core of one NUMA node, from four on all but one."""

    cpu_operators: bool = True
    """Compute bfloat16 on the CPU with the compiled operators, where they were built; without, torch computes it."""

    enable_prefix_caching: bool = True
    """Share KV blocks between requests whose prompts begin alike."""

    bos_token_id: Annotated[int, Field(ge=0)] | None = None
    """Beginning-of-sequence token, with which an empty prompt is completed; default: the checkpoint's."""

    eos_token_id: Annotated[int, Field(ge=0)] | None = None
    """End-of-sequence token; default: the checkpoint's."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further tokens that end a completion; default: the rest of the generation config's EOS list."""

    max_core_restarts: Annotated[int, Field(ge=0)] = 30
    """Times that the engine may be started again within `core_restart_window`, before the server gives up; 0: never.

    Live requests go on where they were."""

    core_restart_window: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds over which `max_core_restarts` counts."""

    stall_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds without a completed step, while there is work, after which the engine is started again."""

    lora: tuple[str, ...] = ()
    """LoRA adapters to serve beside the model, each NAME=DIRECTORY; requests choose one by its name as `model`."""

    parallel_config: ParallelConfig = ParallelConfig()
    compilation_config: CompilationConfig = CompilationConfig()
    speculative_config: SpeculativeConfig | None = None
    quantization_config: PrecisionConfig = PrecisionConfig()
    server_config: ServerConfig = ServerConfig()

    @classmethod
    def from_fields(cls, **fields: Any) -> Self:
        """A configuration whose sections' fields may stand beside its own: `tensor_parallel_size=2`.

        Raises `ValueError` for a wrong value, and where a section and one of its fields are both given.
        """
        own = {name: value for name, value in fields.items() if name in cls.model_fields}
        sections: dict[str, dict[str, Any]] = {}
        for name in fields.keys() - own.keys():
            section = _SECTION_OF.get(name)
            if section is None:
                own[name] = fields[name]  # Refused with all other unknown ones.
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
            if sum(other.partition("=")[0] == name for other in value) > 1:
                raise ValueError(f"lora names two adapters {name}; each needs a name of its own")
        return value

    @model_validator(mode="after")
    def _adapters_are_not_named_like_the_model(self) -> Self:
        for name in self.lora_paths:
            if name in self.model_names:
                raise ValueError(f"lora names an adapter {name}, which is the model's own name; choose another")
        return self

    @property
    def num_drafts(self) -> int:
        """Of a sequence, that a step verifies at most; 0 where there are none."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that the model itself is served by, the main one first."""
        return self.server_config.served_model_name or (self.model or EMBEDDED_MODEL_NAME,)

    @property
    def lora_paths(self) -> dict[str, Path]:
        """Directory of each adapter by its name; adapters are numbered from 1 in this order."""
        parts = (item.partition("=") for item in self.lora)
        return {name: Path(path) for name, _, path in parts}


_SECTIONS: dict[str, type[Section]] = {
    "parallel_config": ParallelConfig,
    "compilation_config": CompilationConfig,
    "speculative_config": SpeculativeConfig,
    "quantization_config": PrecisionConfig,
    "server_config": ServerConfig,
}
_SECTION_OF = {field: name for name, section in _SECTIONS.items() for field in section.model_fields}
