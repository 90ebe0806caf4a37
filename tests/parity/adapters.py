"""Small random LoRA adapters in the layout that PEFT saves, and checkpoints into which they are merged."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk", "weights_proj"),
    *("in_proj", "input_linear", "output_linear", "w1", "w2", "w3", "fc1_latent_proj", "fc2_latent_proj"),
    *("qkv_proj", "output_gate", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "a_proj", "g_proj"),
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "Wqkv", "fc_in", "fc_out", "f_proj"),
    *("x_proj", "dt_proj", "wq_a", "wkv", "wgate", "wo_b", "shared_expert_gate"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
Weights = dict[str, torch.Tensor]
STACKS = ("gate_up_proj", "down_proj")
"""The stacks of a layer of experts, in the order in which PEFT nests their adapters."""


def read_weights(checkpoint: Path) -> Weights:
    """All tensors of a checkpoint, by name."""
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_adapter(directory: Path, weights: Mapping[str, torch.Tensor], **fields: object) -> Path:
    """An adapter's two files; `fields` are those of its config that differ from PEFT's defaults."""
    config = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_to_transform": None,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "target_modules": [],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **fields,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(weights), directory / "adapter_model.safetensors")
    return directory


def make_adapter(
    directory: Path,
    base: Weights,
    *,
    rank: int,
    alpha: float,
    leaves: set[str] = PROJECTIONS,
    own: Mapping[str, tuple[int, float]] | None = None,
    use_rslora: bool = False,
    seed: int = 0,
) -> Weights:
    """Write an adapter for the projections `leaves` of a checkpoint. Returns its additions to their weights, by name.

    `own` gives rank and alpha of modules whose name has that end, where they differ.
    """
    own = own or {}
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module == name or module.rpartition(".")[2] not in leaves or ".experts." in name or weight.dim() != 2:
            continue
        r, own_alpha = next((ranks for end, ranks in own.items() if module.endswith(end)), (rank, alpha))
        out_features, in_features = weight.shape
        a = torch.randn(r, in_features, generator=generator) * in_features**-0.5
        b = torch.randn(out_features, r, generator=generator) * r**-0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        deltas[name] = b @ a * (own_alpha / (math.sqrt(r) if use_rslora else r))
    write_adapter(
        directory,
        tensors,
        r=rank,
        lora_alpha=alpha,
        use_rslora=use_rslora,
        target_modules=sorted(leaves),
        rank_pattern={end: ranks[0] for end, ranks in own.items()},
        alpha_pattern={end: ranks[1] for end, ranks in own.items()},
    )
    return deltas


def make_expert_adapter(
    directory: Path, model: nn.Module, *, rank: int, alpha: float, is_transposed: bool, is_exchanged: bool = False
) -> None:
    """Write an adapter for the stacks of experts of transformers' `model`, and merge it into them as PEFT does.

    `is_transposed`: stacks have input before output features. `is_exchanged`: the form that older versions of PEFT
    save.
    """
    generator = torch.Generator().manual_seed(3)
    tensors: Weights = {}
    in_before_out = is_transposed or is_exchanged
    for name, stack in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        if not layer.endswith(".experts") or leaf not in STACKS:
            continue
        num_experts, first, second = stack.shape
        inputs, outputs = (first, second) if in_before_out else (second, first)
        a = torch.randn(num_experts * rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, rank * num_experts, generator=generator) * rank**-0.5
        module = f"base_model.model.{layer}" + (".base_layer" if leaf == STACKS[0] else "")
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        downs, ups = a.reshape(num_experts, rank, inputs), b.reshape(outputs, rank, num_experts)
        delta = torch.einsum("ore,eri->eio" if in_before_out else "ore,eri->eoi", ups, downs)
        stack.data += delta * (alpha / rank)
    write_adapter(
        directory, tensors, r=rank, lora_alpha=alpha, target_parameters=[f"mlp.experts.{leaf}" for leaf in STACKS]
    )


def merge(directory: Path, checkpoint: Path, base: Weights, deltas: Weights) -> Path:
    """Write a checkpoint of the merged weights in one file."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    merged = {name: weight + deltas[name] if name in deltas else weight for name, weight in base.items()}
    save_file(merged, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
