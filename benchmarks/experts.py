"""A decode step of a mixture of experts, against reading its weights: `python -m benchmarks.experts`.

Weights that a step does not use are not read, so the bound is the experts that this step's tokens chose, once each.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Table

if TYPE_CHECKING:
    from models.kernels.cpu.library import Library

REPEATS = 15
BATCH = 8
_LAYERS = 3
_HIDDEN, _EXPERT = 2048, 768
_FIELDS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2048,
    "moe_intermediate_size": _EXPERT,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_CONTEXT = 64


def run(repeats: int = REPEATS) -> Table:
    """Medians over `repeats` steps of each kind, in turn."""
    import torch
    from torch import nn

    from models.kernels.cpu import runtime

    operators = runtime.start(torch.get_num_threads())
    model = _model()
    whole = [layer.mlp for layer in model.model.layers]
    chosen: list[torch.Tensor] = []
    hooks = [mlp.gate.register_forward_hook(lambda _module, _args, output: chosen.append(output[1])) for mlp in whole]
    _step(model, None)()
    for hook in hooks:
        hook.remove()
    expert_bytes = 3 * 2 * _HIDDEN * _EXPERT
    active_bytes = sum(len(set(ids.flatten().tolist())) for ids in chosen) * expert_bytes
    memory = torch.zeros(active_bytes // 8, dtype=torch.int64)
    seconds: dict[str, list[float]] = {"whole": [], "dense": [], "read": []}
    steps = {"whole": _step(model, operators)}
    for layer in model.model.layers:
        layer.mlp = nn.Identity()
    steps["dense"] = _step(model, operators)
    for _ in range(repeats):
        for what, step in steps.items():
            for layer, mlp in zip(model.model.layers, whole, strict=True):
                layer.mlp = mlp if what == "whole" else nn.Identity()
            seconds[what].append(_time(step))
        seconds["read"].append(_time(memory.sum))
    medians = {what: statistics.median(found) for what, found in seconds.items()}
    bound = medians["read"] + medians["dense"]
    how = "torch" if operators is None else "the compiled operators"
    return Table(
        "Mixture of experts",
        f"A decode step of {BATCH} sequences, {_LAYERS} layers of {_FIELDS['num_experts']} experts of which a token "
        f"takes {_FIELDS['num_experts_per_tok']}, bfloat16, by {how}; medians of {repeats}.",
        "at most 1.3 times reading the chosen experts' weights once, plus the dense part.",
        ("", "ms", ""),
        [
            ("the step", f"{medians['whole'] * 1e3:.1f}", f"{medians['whole'] / bound:.2f} x the bound"),
            ("its dense part, experts left out", f"{medians['dense'] * 1e3:.1f}", ""),
            (
                f"reading {active_bytes / 1e6:.0f} MB of chosen experts",
                f"{medians['read'] * 1e3:.1f}",
                f"{active_bytes / medians['read'] / 1e9:.1f} GB/s",
            ),
        ],
    )


def _model() -> Any:
    """Random weights; the routers choose as for real."""
    import torch

    from models.kernels.cpu import runtime
    from models.layers.parameter import fill_rows, pack_products
    from models.model_config import ModelConfig
    from models.qwen3_moe import Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_FIELDS))
        config = ModelConfig.from_checkpoint(Path(name))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if runtime.active():
        pack_products(model)
    for parameter in model.parameters():
        for place in range(len(parameter)) if parameter.dim() > 2 else (None,):
            fill_rows(parameter, 0, torch.empty(parameter.shape[-2:]).normal_(std=0.05), place)
    return model.eval()


def _step(model: Any, operators: "Library | None") -> Callable[[], object]:
    """A decode of `BATCH` sequences with some context each, as one call of the operators where there are any."""
    import numpy as np
    import torch

    from engine.worker.layer_caches import LayerCaches
    from models.attention import select_backend
    from models.attention.cpu_native import NativeMetaData
    from models.forward_context import Context, forward_context, set_kv_cache_data
    from models.kernels.cpu.program import record

    cpu, block_size = torch.device("cpu"), 16
    backend, blocks = select_backend(cpu), -(-(_CONTEXT + 1) // 16)
    caches = LayerCaches(
        model.kv_cache_layers(),
        backend,
        block_size=block_size,
        num_slots=BATCH,
        dtype=torch.bfloat16,
        device=cpu,
        kv_dtype=None,
    )
    set_kv_cache_data(caches.allocate(BATCH * blocks))
    tables = np.arange(BATCH * blocks, dtype=np.int32).reshape(BATCH, blocks)
    slots = tables[:, _CONTEXT // block_size].astype(np.int64) * block_size + _CONTEXT % block_size
    ids, positions = torch.arange(BATCH), torch.full((BATCH,), _CONTEXT)

    metadata = backend.build_metadata(
        query_lens=[1] * BATCH,
        seq_lens=[_CONTEXT + 1] * BATCH,
        block_tables=tables,
        slot_mapping=slots,
        num_decodes=BATCH,
    )

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = Context(positions=positions, is_prefill=False, batch_size=BATCH)
        with torch.inference_mode(), forward_context(metadata, context):
            return model(input_ids, positions)  # type: ignore[no-any-return]

    if operators is None:
        return lambda: forward(ids, positions)
    assert isinstance(metadata, NativeMetaData)
    program, native = record(operators, forward, BATCH), metadata.step
    return lambda: program.run(ids, positions, native)


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.stdout.write(run().markdown())
