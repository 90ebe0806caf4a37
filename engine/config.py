"""`Config`: every knob of the server, typed and frozen. The command line, `KAON_*`, YAML and the docs derive from it.

Section fields are spelled flat outside Python (`--port`, `KAON_PORT`, `port:`), so leaf names are unique
across sections; `server.settings` checks that when it builds the command line.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.parallel_config import CLUSTER_KEY_ENV, ParallelConfig
from engine.section import Section
from engine.server_config import ServerConfig

__all__ = [
    "CLUSTER_KEY_ENV",
    "EMBEDDED_MODEL_NAME",
    "CompilationConfig",
    "Config",
    "ParallelConfig",
    "QuantizationConfig",
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


class QuantizationConfig(Section):
    """How weights and the KV cache are stored."""

    quantization: Literal[
        "auto",
        "int8",
        "int4",
        "none",
        "fp8",
        "fbgemm_fp8",
        "compressed-tensors",
        "mxfp4",
        "quark",
        "awq",
        "gptq",
        "modelopt",
    ] = "auto"
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
    """Beginning-of-sequence token; default: the checkpoint's."""

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
    quantization_config: QuantizationConfig = QuantizationConfig()
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
    "quantization_config": QuantizationConfig,
    "server_config": ServerConfig,
}
_SECTION_OF = {field: name for name, section in _SECTIONS.items() for field in section.model_fields}
