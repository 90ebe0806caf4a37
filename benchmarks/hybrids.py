"""Models with recurrent, latent and compressed layers on the CPU, compared with a dense Llama; a table.

The models have random weights and the proportions of published layers, with dense layers in place of experts where the
architecture has such layers. They are in memory together and take turns, because the memory rate of a shared machine
changes within seconds. A decode step is one call of the compiled operators without the head.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import write_random
from benchmarks.report import Table

if TYPE_CHECKING:
    import torch

    from engine.runner.kv_cache import LayerCaches
    from models.attention.backend import AttentionBackend
    from models.ops.cpu.program import Program

ROUNDS = 12
PROMPTS = 2
LOADS = 2
_ROWS, _CONTEXT, _CHUNK, _CHUNKS, _BLOCK = 8, 64, 256, 2, 16
_BASE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 1024,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
)
_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
)
_MAMBA_ONLY: Mapping[str, Any] = MappingProxyType({"vocab_size": 1024, "head_dim": 64, "state_size": 128})
_V4_LAYERS = ["compressed_sparse_attention", "heavily_compressed_attention"]
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Llama": ("LlamaConfig", _BASE),
        "Qwen3-Next": ("Qwen3NextConfig", {**_BASE, **_DELTA, "mlp_only_layers": [0, 1, 2, 3]}),
        "Qwen3.5": ("Qwen3_5TextConfig", {**_BASE, **_DELTA, "linear_num_value_heads": 16}),
        "Nemotron-H": (
            "NemotronHConfig",
            {
                **_BASE,
                "num_hidden_layers": 8,
                "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "n_groups": 8,
            },
        ),
        "Granite 4": (
            "GraniteMoeHybridConfig",
            {
                **_BASE,
                "layer_types": ["mamba", "mamba", "attention", "mamba"],
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "shared_intermediate_size": 5632,
                "mamba_n_heads": 64,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
            },
        ),
        "Falcon-H1": (
            "FalconH1Config",
            {
                **_BASE,
                "mamba_d_ssm": 3072,
                "mamba_n_heads": 48,
                "mamba_d_head": 64,
                "mamba_d_state": 256,
                "mamba_n_groups": 1,
            },
        ),
        "Mamba-2, width 2560": (
            "Mamba2Config",
            {**_MAMBA_ONLY, "hidden_size": 2560, "num_heads": 80, "n_groups": 1, "num_hidden_layers": 5},
        ),
        "Mamba-2, width 1024": (
            "Mamba2Config",
            {**_MAMBA_ONLY, "hidden_size": 1024, "num_heads": 32, "n_groups": 1, "num_hidden_layers": 16},
        ),
        "GLM-5.3-Flash": (
            "Glm5NextTextConfig",
            {
                **_BASE,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "q_lora_rank": 768,
                "kv_lora_rank": 512,
                "linear_num_heads": 32,
                "mlp_layer_types": ["dense"] * 4,
                "index_n_heads": 16,
                "index_topk": 512,
                "tie_word_embeddings": False,
                "pad_token_id": 0,
            },
        ),
        "DeepSeek-V4": (
            "DeepseekV4Config",
            {
                **_BASE,
                "layer_types": [*_V4_LAYERS, *_V4_LAYERS],
                "mlp_layer_types": ["moe"] * 4,
                "moe_intermediate_size": 1024,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "q_lora_rank": 512,
                "o_lora_rank": 512,
                "n_routed_experts": 6,
                "num_experts_per_tok": 6,
                "index_n_heads": 32,
                "tie_word_embeddings": False,
            },
        ),
    }
)
"""By name: the class of transformers' configuration, and its fields."""


def write(name: str, folder: Path) -> Path:
    """Return the checkpoint's directory in `folder`; write the checkpoint if it is not there."""
    directory = folder / name.replace(", width ", "-")
    if (directory / "tokenizer.json").exists():
        return directory
    import transformers

    class_name, fields = MODELS[name]
    config = getattr(transformers, class_name)(**{**fields, "bos_token_id": 1, "eos_token_id": 2})
    if class_name.startswith("Glm5Next"):
        _register_glm(config)
    directory.mkdir(parents=True)
    write_random(directory, config)
    return directory


def _register_glm(config: Any) -> None:
    """Register a causal language model of GLM-5.3-Flash's text part, which transformers does not have."""
    from torch import nn
    from transformers import AutoModelForCausalLM
    from transformers.models.glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel

    class Glm5NextForCausalLM(Glm5NextPreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Glm5NextTextModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    Glm5NextForCausalLM.config_class = type(config)
    AutoModelForCausalLM.register(type(config), Glm5NextForCausalLM, exist_ok=True)


@dataclass(slots=True)
class _Model:
    """A loaded model, its recorded pass, and the seconds of its steps."""

    name: str
    directory: Path
    weight_bytes: int
    state_bytes: int
    """Of one sequence."""
    backend: "AttentionBackend"
    caches: "LayerCaches"
    program: "Program"
    kept: object
    """The model and its caches, to which the program points."""
    file_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def read_bytes(self, rows: int) -> int:
        """Bytes of weights and states that a decode of `rows` sequences reads."""
        return self.weight_bytes + rows * self.state_bytes

    def step(self, rows: int, first: int, count: int) -> Callable[[], object]:
        """A step of `count` tokens from position `first` on of each of `rows` sequences."""
        import numpy as np
        import torch

        from models.attention.backend import AttentionBatch
        from models.attention.cpu_native import NativeMetaData

        of_row = -(-(_CONTEXT + _CHUNK * _CHUNKS + 1) // _BLOCK)
        tables = np.arange(rows * of_row, dtype=np.int32).reshape(rows, of_row)
        at = np.arange(first, first + count)
        slots = (tables[:, at // _BLOCK].astype(np.int64) * _BLOCK + at % _BLOCK).flatten()
        metadata = self.backend.build_metadata(
            AttentionBatch(
                query_lens=np.full(rows, count),
                seq_lens=np.full(rows, first + count),
                block_tables=tables,
                slot_mapping=slots,
                num_decodes=rows if count == 1 else 0,
                states=np.arange(rows, dtype=np.int64),
            )
        )
        assert isinstance(metadata, NativeMetaData)
        ids = torch.arange(rows * count) * 7 % 1000 + 3
        positions = torch.from_numpy(np.tile(at, rows))
        native = metadata.step
        return lambda: self.program.run(ids, positions, native)


def _load(directory: Path) -> tuple[Any, float]:
    """Return the model, and the seconds that its loading took."""
    import torch

    from models.loading.checkpoint import read_checkpoint_config
    from models.loading.loader import load_model

    config = read_checkpoint_config(directory, "kaon")
    began = time.perf_counter()
    model = load_model(directory, config, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    return model, time.perf_counter() - began


def _start(name: str, directory: Path) -> _Model:
    """Load the model, and record its pass."""
    import torch

    from engine.runner.kv_cache import LayerCaches
    from models.attention.backend import NO_ROWS, select_backend
    from models.attention.context import Context, forward_context
    from models.layers.parameter import weight_bytes
    from models.ops.cpu.program import record
    from models.ops.cpu.runtime import load_library

    model, seconds = _load(directory)
    backend = select_backend(torch.device("cpu"))
    caches = LayerCaches(
        model.kv_cache_layers(),
        backend,
        block_size=_BLOCK,
        num_slots=_ROWS,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    blocks = _ROWS * -(-(_CONTEXT + _CHUNK * _CHUNKS + 1) // _BLOCK)
    kv_cache_data = caches.allocate(blocks)
    metadata, library = backend.build_metadata(NO_ROWS), load_library()
    assert library is not None

    def forward(input_ids: "torch.Tensor", positions: "torch.Tensor") -> "torch.Tensor":
        context = Context(positions=positions, is_prefill=False, batch_size=0)
        with forward_context(metadata, context, kv_cache_data=kv_cache_data):
            return model(input_ids, positions)  # type: ignore[no-any-return]

    program = record(library, forward, max(_CHUNK, _ROWS * _CONTEXT))
    weights = [each for each, _ in model.named_parameters() if "embed" not in each and "lm_head" not in each]
    return _Model(
        name,
        directory,
        sum(weight_bytes(model.get_parameter(each)) for each in weights),
        caches.slot_bytes,
        backend,
        caches,
        program,
        (model, kv_cache_data),
        sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        {"load": [seconds]},
    )


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _measure(models: Sequence[_Model], rounds: int, prompts: int, loads: int) -> None:
    """Store the seconds of steps of all models in turn; next to each decode step, those of a loop of loads."""
    import torch

    from models.ops.cpu import structures
    from models.ops.cpu.runtime import current
    from models.ops.cpu.structures import Step

    memory = torch.ones(max(model.read_bytes(_ROWS) for model in models) // 8 + 1, dtype=torch.int64)
    found = torch.zeros(torch.get_num_threads(), dtype=torch.int64)

    def read(num_bytes: int) -> float:
        arguments = structures.ReadLimit(memory.data_ptr(), num_bytes // 64 * 64, found.data_ptr())
        return _time(lambda: current().run(arguments, Step(num_tokens=1), (memory, found)))

    for number in range(prompts + 1):
        for model in models:
            steps = [model.step(1, first, _CHUNK) for first in range(0, _CHUNK * _CHUNKS, _CHUNK)]
            taken = sum(_time(step) for step in steps)
            if number:
                model.seconds.setdefault("prompt", []).append(taken)
    for model in models:
        model.step(_ROWS, 0, _CONTEXT)()
    for _ in range(rounds):
        for model in models:
            for rows in (1, _ROWS):
                step, num_bytes = model.step(rows, _CONTEXT, 1), model.read_bytes(rows)
                step()
                before = read(num_bytes)
                taken = _time(step)
                model.seconds.setdefault(f"decode {rows}", []).append(taken)
                model.seconds.setdefault(f"times {rows}", []).append(2 * taken / (before + read(num_bytes)))
                model.seconds.setdefault(f"read {rows}", []).append(before)
    for _ in range(loads - 1):
        for model in models:
            model.seconds["load"].append(_load(model.directory)[1])


def hybrids_table(
    names: Sequence[str] = tuple(MODELS),
    folder: Path | None = None,
    rounds: int = ROUNDS,
    prompts: int = PROMPTS,
    loads: int = LOADS,
) -> Table:
    """Medians over the rounds. `folder`: where the checkpoints are, or are written; None for a temporary directory."""
    import torch

    from models.ops.cpu import runtime

    runtime.start(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as temporary:
        models = [_start(name, write(name, folder or Path(temporary))) for name in dict.fromkeys(("Llama", *names))]
        _measure(models, rounds, prompts, loads)
    rows, base = [], models[0]

    def median(model: _Model, what: str) -> float:
        return statistics.median(model.seconds[what])

    for model in models:
        prompt = model.weight_bytes / median(model, "prompt") / (base.weight_bytes / median(base, "prompt"))
        loading = median(model, "load") / model.file_bytes / (median(base, "load") / base.file_bytes)
        cells = [model.name, f"{model.weight_bytes / 1e6:.0f}", f"{model.state_bytes / 1e6:.1f}"]
        for each in (1, _ROWS):
            per_byte = median(model, f"decode {each}") / model.read_bytes(each)
            dense = median(base, f"decode {each}") / base.read_bytes(each)
            cells += [f"{median(model, f'times {each}'):.2f}", f"{per_byte / dense:.2f}"]
        rows.append((*cells, f"{prompt:.2f}", f"{loading:.2f}"))
    rate = statistics.median(model.read_bytes(1) / taken for model in models for taken in model.seconds["read 1"])
    return Table(
        "Hybrid models",
        f"Random weights in bfloat16, {torch.get_num_threads()} threads, medians of {rounds} rounds in turn. A decode "
        f"of 1 and {_ROWS} sequences, in multiples of a loop of loads over as many bytes as weights and states have, "
        f"next to each step ({rate / 1e9:.1f} GB/s), and of Llama's time for as many bytes; products of a prompt of "
        f"{_CHUNK * _CHUNKS} tokens a second and seconds to load a gigabyte, both relative to Llama's.",
        "a decode at most 1.2 x reading; prompts at least 0.6 of Llama's rate; loading in at most its time.",
        (
            *("", "weights, MB", "state, MB", "1 row, x reading", "x Llama"),
            *(f"{_ROWS} rows, x reading", "x Llama", "prompts, x rate", "loading, x time"),
        ),
        rows,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrids", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoints are kept")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{'; '.join(MODELS)}; all of them by default")
    parser.add_argument("--write", action="store_true", help="write the checkpoints, and measure nothing")
    options = parser.parse_args()
    if options.write:
        for each in options.names or MODELS:
            write(each, options.folder)
    else:
        sys.stdout.write(hybrids_table(options.names or tuple(MODELS), options.folder).markdown())
