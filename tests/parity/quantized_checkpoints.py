"""Quantised checkpoints in each published layout, and dense ones of the same weights.

The packing here is written from the formats' descriptions with NumPy, independently of the code that reads it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import Family, edit_json, make_checkpoint
from tests.parity.random_codes import E2M1

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each nibble, the column among eight that it stores."""

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""From a weight to a module's tensors and their dequantised weight."""


class Pair(NamedTuple):
    """The same model twice."""

    quantised: Path
    dense: Path


def write_pair(
    directory: Path,
    quantize: Quantize,
    config: Mapping[str, Any],
    *,
    module: Callable[[str], bool] = lambda name: name.endswith("_proj"),
    section: str = "quantization_config",
    family: Family | None = None,
    by_leaf: Mapping[str, Quantize] = MappingProxyType({}),
    **overrides: Any,
) -> Pair:
    """A tiny model, Llama by default, whose modules that `module` selects are quantised, and its dense twin.

    `by_leaf`: quantisers by the end of a module's name, if modules are quantised in several ways.
    """
    if family is None:
        shape = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 8, "num_key_value_heads": 2}
        overrides = {**shape, **overrides}
    dense = make_checkpoint(directory / "dense", family or "llama", **overrides)
    quantised = make_checkpoint(directory / "quantised", family or "llama", **overrides)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight" and module(owner):
            parts, meant[name] = by_leaf.get(owner.rpartition(".")[2], quantize)(tensor)
            # GPTQ stores a bias of zeros for a layer that has none.
            named = {f"{owner}.{part}": value.contiguous() for part, value in parts.items()}
            stored = named | stored
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, dense / "model.safetensors")
    edit_json(quantised / "config.json", **{section: dict(config)})
    return Pair(quantised, dense)


def write_gpt_oss_pair(directory: Path, family: Family, **overrides: Any) -> Pair:
    """A tiny gpt-oss in its published layout, with experts as blocks and scales, and its dense twin."""
    dense = make_checkpoint(directory / "dense", family, **overrides)
    quantised = make_checkpoint(directory / "quantised", family, **overrides)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            parts, rows = mxfp4(tensor.transpose(1, 2).reshape(-1, inputs))
            stored[f"{name}_blocks"] = parts["weight"].view(experts, outputs, inputs // 32, 16)
            stored[f"{name}_scales"] = parts["weight_scale"].view(experts, outputs, inputs // 32)
            meant[name] = rows.view(experts, outputs, inputs).transpose(1, 2).contiguous()
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, dense / "model.safetensors")
    edit_json(quantised / "config.json", quantization_config=GPT_OSS_CONFIG)
    return Pair(quantised, dense)


def scatter(path: Path, *, seed: int = 0, shards: int = 5) -> None:
    """Distribute a checkpoint's tensors over several files at random."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = np.random.default_rng(seed).integers(0, shards, len(tensors))
    weight_map = {name: f"model-{place}.safetensors" for name, place in zip(sorted(tensors), places, strict=True)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in weight_map if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def stack_experts(path: Path, parts: tuple[str, ...], into: str, *, leaves: Mapping[str, str]) -> None:
    """Stack tensors of all experts: `experts.E.PART.LEAF` of each part, one after the other, into `experts.INTO`.

    `leaves`: the leaves to stack, and the end of the stack's name for each.
    """

    def stack(tensors: Tensors) -> None:
        for leaf, ending in leaves.items():
            first = f".0.{parts[0]}.{leaf}"
            for experts in [name.removesuffix(first) for name in tensors if name.endswith(f".experts{first}")]:
                rows = []
                while f"{experts}.{len(rows)}.{parts[0]}.{leaf}" in tensors:
                    alone = [tensors.pop(f"{experts}.{len(rows)}.{part}.{leaf}") for part in parts]
                    rows.append(torch.cat(alone))
                tensors[f"{experts}.{into}{ending}"] = torch.stack(rows)

    change(path, stack)


def stacks_to_linear_layers(pair: Pair, quantize: Quantize, *, interleaved: bool, halves: bool) -> None:
    """Replace stacks `[experts, inputs, outputs]` by quantised linear layers for each expert, and the dense twin's by
    what these mean.

    `halves`: whether the stack has gates, then ups; otherwise they alternate. `interleaved`: whether the layers are
    `gate_up_proj`, in which they alternate, or `gate_proj` and `up_proj`.
    """
    tensors, dense = (load_file(path / "model.safetensors") for path in pair)
    for name in [each for each in tensors if each.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        experts, _, kind = name.rpartition(".")
        bias, meant = tensors.pop(f"{name}_bias", None), []
        for index, weight in enumerate(tensors.pop(name).transpose(1, 2)):
            width = len(weight) // 2
            rows = {kind: slice(None)}
            if kind == "gate_up_proj" and not interleaved:
                gate, up = (slice(width), slice(width, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
                rows = {"gate_proj": gate, "up_proj": up}
            whole = torch.empty_like(weight)
            for leaf, some in rows.items():
                parts, whole[some] = quantize(weight[some].contiguous())
                tensors |= {f"{experts}.{index}.{leaf}.{part}": value for part, value in parts.items()}
                if bias is not None:
                    tensors[f"{experts}.{index}.{leaf}.bias"] = bias[index][some]
            meant.append(whole)
        dense[name] = torch.stack(meant).transpose(1, 2)
    for path, found in ((pair.quantised, tensors), (pair.dense, dense)):
        save_file({name: each.contiguous() for name, each in found.items()}, path / "model.safetensors")


def reshaped(made: tuple[Tensors, torch.Tensor], part: str, shape: tuple[int, ...]) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a quantised module, one of which has another shape."""
    tensors, meant = made
    return {**tensors, part: tensors[part].reshape(shape)}, meant


def change(path: Path, edit: Callable[[Tensors], object]) -> None:
    """Rewrite a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    extra = {"input_scale": torch.tensor(0.5)}
    return {"weight": stored, "weight_scale": scale.clone(), **extra}, stored.float() * scale


def fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    stored = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def fp8_block(weight: torch.Tensor, name: str = "weight_scale_inv") -> tuple[Tensors, torch.Tensor]:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale, stored, meant = torch.empty(rows, columns), torch.empty_like(weight), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            scale[row, column] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale[row, column]).to(torch.float8_e4m3fn).float()
            meant[at] = stored[at] * scale[row, column]
    return {"weight": stored.to(torch.float8_e4m3fn), name: scale}, meant


def int8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round()
    return {"weight": stored.to(torch.int8), "weight_scale": scale}, stored * scale


def int8_asymmetric(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    stored = (weight / scale + zero).round().clamp(-128, 127)
    parts = {"weight": stored.to(torch.int8), "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return parts, (stored - zero) * scale


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quark's and compressed-tensors' layout: a byte has inputs 2i (low) and 2i + 1 (high)."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // 32, 32)
    exponent = torch.floor(torch.log2(grouped.abs().amax(-1, keepdim=True))) - 2
    scaled = grouped / 2**exponent
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    meant = E2M1[codes] * torch.sign(scaled) * 2**exponent
    codes = (codes + 8 * (scaled < 0)).view(rows, columns)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    scale = (exponent[..., 0] + 127).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale}, meant.view(rows, columns)


def nvfp4(weight: torch.Tensor, *, by_modelopt: bool = False) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors' or ModelOpt's: FP8 scales of 16 inputs, multiplied by one scale of the whole weight."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // 16, 16)
    factor = weight.abs().max() / (6 * 448)
    local = (grouped.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    scale = local.float()[..., None] * factor
    scaled = grouped / scale
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    meant = E2M1[codes] * torch.sign(scaled) * scale
    codes = (codes + 8 * (scaled < 0)).view(rows, columns)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    if by_modelopt:
        parts = {"weight": packed, "weight_scale": local, "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
    else:
        parts = {
            "weight_packed": packed,
            "weight_scale": local,
            "weight_global_scale": (1 / factor).view(1),
            "input_global_scale": torch.tensor([2.0]),
        }
    return parts, meant.view(rows, columns)


class Groups(NamedTuple):
    """Integer groups of a weight: `(q - zero) * scale`, one zero and scale for each row and group."""

    q: npt.NDArray[np.int64]  # [O, I]
    zero: npt.NDArray[np.int64]  # [O, groups]
    scale: torch.Tensor  # [O, groups] float16
    group: npt.NDArray[np.int64]  # [I]
    meant: torch.Tensor  # [O, I]


def group_quantize(weight: torch.Tensor, *, bits: int, size: int, symmetric: bool, shuffled: bool = False) -> Groups:
    """Round a weight to unsigned integers; `shuffled`: the inputs of a group are not adjacent."""
    rows, columns = weight.shape
    group = np.arange(columns) // size
    if shuffled:
        group = np.random.default_rng(columns).permutation(group)
    levels = 2**bits
    q, zero = np.empty((rows, columns), np.int64), np.empty((rows, group.max() + 1), np.int64)
    scale = torch.empty(rows, group.max() + 1, dtype=torch.float16)
    meant = torch.empty_like(weight)
    for index in range(group.max() + 1):
        inputs = np.flatnonzero(group == index)
        values = weight[:, inputs]
        if not symmetric and index == 0:
            values = values.abs()  # Without negative weights, the zero point is 0.
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0.01)
        if symmetric:
            scale[:, index] = 2 * torch.maximum(-low, high) / (levels - 1)
            zero[:, index] = levels // 2
        else:
            scale[:, index] = (high - low) / (levels - 1)
            zero[:, index] = (-low / scale[:, index].float()).round().clamp(0, levels - 1).numpy()
        steps, middle = scale[:, index, None].float(), torch.from_numpy(zero[:, index, None])
        rounded = (values / steps + middle).round().clamp(0, levels - 1)
        q[:, inputs] = rounded.long().numpy()
        meant[:, inputs] = (rounded - middle) * steps
    return Groups(q, zero, scale, group, meant)


def pack(values: npt.NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack unsigned numbers of the last dimension into int32 words; `order`: for each field of a word, which number it
    stores."""
    per_word = 32 // bits
    words = np.zeros((*values.shape[:-1], values.shape[-1] // per_word), np.uint64)
    for place, number in enumerate(order or range(per_word)):
        words |= values[..., number::per_word].astype(np.uint64) << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = group_quantize(weight, bits=4, size=32, symmetric=False)
    parts = {
        "qweight": pack(groups.q.T, 4, AWQ_ORDER),
        "qzeros": pack(groups.zero.T, 4, AWQ_ORDER),
        "scales": groups.scale.t(),
    }
    return parts, groups.meant


def gptq(
    *, bits: int = 4, symmetric: bool = True, shuffled: bool = False, zero_offset: int = 1, size: int = 32
) -> Quantize:
    """`zero_offset`: the number that the format subtracts from each zero point."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = group_quantize(weight, bits=bits, size=size, symmetric=symmetric, shuffled=shuffled)
        parts = {
            "qweight": pack(groups.q, bits).t(),
            "qzeros": pack((groups.zero.T - zero_offset) % 2**bits, bits),
            "scales": groups.scale.t(),
            "g_idx": torch.from_numpy(groups.group).int(),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return parts, groups.meant

    return quantize


def pack_quantized(*, bits: int = 4, symmetric: bool = True, shuffled: bool = False, size: int = 32) -> Quantize:
    """compressed-tensors': signed numbers, stored with an offset of half the range."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = group_quantize(weight, bits=bits, size=size, symmetric=symmetric, shuffled=shuffled)
        parts = {
            "weight_packed": pack(groups.q, bits),
            "weight_scale": groups.scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(groups.zero.T, bits).t()
        if shuffled:
            parts["weight_g_idx"] = torch.from_numpy(groups.group).int()
        return parts, groups.meant

    return quantize


def compressed_tensors(
    storage_format: str, *, ignore: tuple[str, ...] = ("lm_head",), rounds_inputs: bool = False, **weights: Any
) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights},
    }
    if rounds_inputs:
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": storage_format,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
    }


def gptq_config(**fields: Any) -> dict[str, Any]:
    """A `quantization_config` of GPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **fields}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPT_OSS_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FP8_BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "static"}


def quark_config(dtype: str, qscheme: str, **weight: Any) -> dict[str, Any]:
    """A `quantization_config` of Quark."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": dtype, "qscheme": qscheme, **weight}, "input_tensors": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*.gate"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }


def mxfp8(weight: torch.Tensor, name: str = "weight_scale_inv") -> tuple[Tensors, torch.Tensor]:
    """A power of two for 32 inputs, stored as its exponent."""
    return _fp8_by_powers(weight, (1, 32), name, torch.uint8)


def deepseek_v4_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A power of two for a block of 128 by 128."""
    return _fp8_by_powers(weight, (128, 128), "scale", torch.float8_e8m0fnu)


def deepseek_v4_fp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A routed expert's: pairs of codes in signed bytes."""
    parts, meant = mxfp4(weight)
    scale = parts["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": parts["weight"].view(torch.int8), "scale": scale}, meant


def _fp8_by_powers(
    weight: torch.Tensor, block: tuple[int, int], name: str, dtype: torch.dtype
) -> tuple[Tensors, torch.Tensor]:
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    largest = padded.view(rows, block[0], columns, block[1]).amax((1, 3))
    powers = torch.ceil(torch.log2(largest / 448))
    of_each = 2 ** powers.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    of_each = of_each[: weight.shape[0], : weight.shape[1]]
    stored = (weight / of_each).to(torch.float8_e4m3fn)
    return {"weight": stored, name: (powers + 127).to(torch.uint8).view(dtype)}, stored.float() * of_each
