"""`load_model`: builds a model and fills it from the checkpoint's safetensors. Called by the model runner.

Every parameter must be filled and every tensor used, or a `CheckpointError` names those that were not.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from tqdm import tqdm

from models.architectures.config import CheckpointConfig, ModelConfig
from models.architectures.registry import ARCHITECTURES
from models.errors import CheckpointError, first_line
from models.layers.attention import Attention
from models.layers.base import CausalLM
from models.layers.linear import can_pack, pack_filled_products
from models.layers.mla import MLAAttention
from models.layers.moe import FusedMoE
from models.layers.parameter import (
    Shard,
    Spelling,
    WeightShapeError,
    is_product,
    pack_products,
    products_without_memory,
    sources_of,
    take_memory,
    weight_bytes,
    weight_loader_of,
)
from models.loading.checkpoint import TransformersConfig, some, tensors_of_file, weight_files
from models.ops import aiter, triton
from models.ops.cpu import runtime
from models.ops.stored_weight import keep_quantized
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel
from models.quantization.config import QuantizationConfig, WeightBits
from models.quantization.dequantize import Dequantizer, ExpertNames
from models.quantization.layouts import layout_of
from models.quantization.stored import can_be_rounded_again

# [absent_experts] `AbsentExperts`: the tensors of a checkpoint that belong to experts of other ranks. Used by the
# loader.

_EXPERTS = ".experts."


class AbsentExperts:
    """Contains the names of tensors of one expert, however it is stored, that this rank does not hold."""

    def __init__(self, model: nn.Module, checkpoint_name: Callable[[str], str]) -> None:
        """`checkpoint_name`: what the checkpoint calls a module's parameter."""
        self.is_mixture = False
        """Whether the model has experts at all."""
        self._prefixes: set[str] = set()
        for name, module in model.named_modules():
            if isinstance(module, FusedMoE):
                self.is_mixture = True
                base = checkpoint_name(f"{name}.w13").rpartition(".")[0]
                others = set(range(module.num_experts)) - set(module.local_experts)
                self._prefixes |= {f"{base}.{expert}" for expert in others}

    def __contains__(self, name: object) -> bool:
        if not self._prefixes or not isinstance(name, str):
            return False
        base, separator, rest = name.partition(_EXPERTS)
        return f"{base}{separator}{rest.partition('.')[0]}" in self._prefixes

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of them that are absent."""
        return [name for name in names if name in self]


_log = logging.getLogger(__name__)

_BAR_AFTER_SECONDS = 1.0
"""A load that is over sooner shows no bar."""


def load_model(
    path: Path,
    config: CheckpointConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    parallel: TensorParallel = SINGLE_RANK,
    available_bytes: int | None = None,
    weight_bits: WeightBits = 16,
) -> CausalLM:
    """The model of the checkpoint directory `path`, this rank's shard of it, converted to `dtype` on `device`.

    `progress` draws a bar of files on stderr. `available_bytes`: the most that the weights may take; None: whatever
    the device grants, and a host grants more than it has. `weight_bits` below 16 rounds weights as they are
    read, which takes the CPU's operators. Raises `CheckpointError` for a checkpoint that is damaged,
    does not fit, or is not the model that `config` describes.
    """
    if isinstance(config, TransformersConfig):
        from models.loading.transformers_model import load_transformers_model

        if parallel.experts is not None:
            raise CheckpointError(
                f"enable_expert_parallel is set, but {config.architecture} runs by transformers' own code, whose "
                "experts cannot be spread; leave it out"
            )
        if parallel.size > 1:
            raise CheckpointError(
                f"tensor_parallel_size is {parallel.size}, but {config.architecture} runs by transformers' own code, "
                "on one device; set it to 1"
            )
        return load_transformers_model(path, config, dtype=dtype, device=device, progress=progress)
    assert isinstance(config, ModelConfig)
    files = weight_files(path)
    model_class = ARCHITECTURES[config.architecture].model_class
    may_stay = config.quantization is not None and triton.takes("linear")
    try:
        with _default_dtype(dtype), device, products_without_memory() if may_stay else nullcontext():
            model = model_class(config, parallel)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the memory of device {device} ({first_line(error)})") from error
    absent = AbsentExperts(model, partial(_checkpoint_name, model=model))
    if parallel.experts is not None and not absent.is_mixture:
        raise CheckpointError(
            f"enable_expert_parallel is set, but {config.architecture} of {path} has no experts; leave it out"
        )
    _require_memory(model, available_bytes, path, weight_bits)
    is_packed = dtype is torch.bfloat16 and device.type == "cpu" and runtime.active()
    assert is_packed or weight_bits == 16, "weights are rounded for the CPU's operators"
    if is_packed:
        pack_products(model, weight_bits)
    missing = _wanted_tensors(model)
    # The kernels compute experts of one replica only; those of several are asked by torch.
    is_shared_out = parallel.experts is not None and parallel.experts.exchange is not None
    stays: frozenset[str] = frozenset()
    if may_stay:
        may_stack = triton.takes("moe") and not is_shared_out
        stays = _staying_quantized(missing, config.quantization, may_stack=may_stack)
    take_memory(model.parameters())
    ignored = _prediction_layers(config)
    left_over: list[str] = []
    dequantizer = Dequantizer(
        config.quantization, dtype, missing.__contains__, partial(_expert_names, missing), stays.__contains__
    )
    bar = tqdm(
        files, desc="Loading weights", unit="file", file=sys.stderr, delay=_BAR_AFTER_SECONDS, disable=not progress
    )
    seen: dict[str, Path] = {}
    for file in bar:
        for name, tensor in dequantizer.dense(tensors_of_file(file, seen, ignored, absent)):
            target = missing.pop(name, None)
            if target is not None:
                _fill(target, tensor, name, file)
                for rival in target.rivals:
                    missing.pop(rival, None)
            elif not _is_harmless(name, config):
                left_over.append(name)
    for name in absent.among(missing):
        del missing[name]
    if lacking := [name for name, target in missing.items() if not target.is_alternative_to(missing)]:
        raise CheckpointError(f"{path} lacks {some(dequantizer.lacking(lacking))}, which {config.architecture} needs")
    scales = dequantizer.kv_scales
    for module in model.modules():
        if isinstance(module, Attention | MLAAttention) and module.layer_name in scales:
            found = scales.pop(module.layer_name)
            module.scale_cache(found.k, found.v)
    left_over += [name for found in scales.values() for name in found.names]
    if left_over := left_over + dequantizer.left_over():
        raise CheckpointError(f"{path} holds {some(left_over)}, for which {config.architecture} has no place")
    for module in model.modules():
        if is_packed and isinstance(module, MLAAttention):
            module.pack_heads()
    if device.type == "cpu" and not runtime.active() and can_pack(dtype):
        pack_filled_products(model)
    if aiter.takes("moe"):
        _shuffle_experts(model)
    return cast(CausalLM, model.eval())


def _shuffle_experts(model: nn.Module) -> None:
    """Have aiter compute the experts of a filled model, where it can."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    left = sum(not layer.shuffle() for layer in layers)
    if left:
        _log.warning(
            "%d of %d layers of experts are not computed by aiter, but by Triton: they have biases, another "
            "activation than SwiGLU, other sizes than multiples of 32, or are quantised or spread in another way",
            left,
            len(layers),
        )


def _require_memory(model: nn.Module, available: int | None, path: Path, weight_bits: WeightBits) -> None:
    """Raise `CheckpointError` for weights that do not fit. Empty ones take no memory of a host yet."""
    needed = sum(weight_bytes(parameter, weight_bits) for parameter in model.parameters())
    if available is not None and needed > available:
        raise CheckpointError(
            f"{path} does not fit the memory: its weights take {needed / 2**30:.2f} GiB, and {available / 2**30:.2f} "
            "GiB are available"
        )


class _Target(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    parameter: nn.Parameter
    shard: Shard
    rivals: tuple[str, ...] = ()
    """The parameter's tensors in other spellings, which this one's spelling replaces."""
    is_first_spelling: bool = True

    def is_alternative_to(self, missing: Mapping[str, "_Target"]) -> bool:
        """Whether nothing of the parameter was found, and another spelling is the one to name."""
        return not self.is_first_spelling and any(rival in missing for rival in self.rivals)


def _wanted_tensors(model: nn.Module) -> dict[str, _Target]:
    """By name in the checkpoint, each tensor that fills a parameter or a part of a packed one."""
    parts: dict[str, list[tuple[str, str | int]]] = {}
    for source, (packed, shard) in cast("dict[str, tuple[str, str | int]]", model.packed_modules_mapping).items():
        parts.setdefault(packed, []).append((source, shard))
    wanted: dict[str, _Target] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = _checkpoint_name(name, model).rpartition(".")
        parent, _, kind = module.rpartition(".")
        if spellings := sources_of(parameter):
            wanted |= _in_any_spelling(parameter, parent, spellings)
        elif kind in parts:
            for source, shard in parts[kind]:
                wanted[f"{parent}.{source}.{leaf}"] = _Target(parameter, shard)
        else:
            wanted[f"{module}.{leaf}"] = _Target(parameter, None)
    return wanted


def _staying_quantized(
    wanted: Mapping[str, _Target], quantization: QuantizationConfig | None, *, may_stack: bool
) -> frozenset[str]:
    """The names of weights that a GPU's kernels take as they are stored; the parameters are made ready for them.

    `may_stack`: whether stacks of experts may be among them.
    """
    assert quantization is not None
    names: dict[nn.Parameter, list[str]] = {}
    for name, target in wanted.items():
        if is_product(target.parameter) and (may_stack or target.parameter.dim() == 2):
            names.setdefault(target.parameter, []).append(name)
    staying: list[str] = []
    for parameter, sources in names.items():
        layers = [quantization.for_layer(name.removesuffix(".weight")) for name in sources]
        if parameter.dim() == 3:
            # The name of the stack is the last.
            stack = layers.pop()
            if stack is not None and can_be_rounded_again(parameter, stack):
                keep_quantized(parameter, is_rounded_again=True)
                continue
        if all(layer is not None and layout_of(layer).has_kernel for layer in layers):
            keep_quantized(parameter)
            staying += sources
    return frozenset(staying)


def _in_any_spelling(parameter: nn.Parameter, parent: str, spellings: tuple[Spelling, ...]) -> dict[str, _Target]:
    """By name in the checkpoint, each tensor that may fill a part of the parameter."""
    named = [{f"{parent}.{name}": shard for name, shard in spelling.items()} for spelling in spellings]
    targets = {}
    for spelling in named:
        rivals = tuple(name for other in named if other is not spelling for name in other)
        for name, shard in spelling.items():
            targets[name] = _Target(parameter, shard, rivals, spelling is named[0])
    return targets


def _expert_names(wanted: Mapping[str, _Target], stack: str) -> ExpertNames:
    """By expert and part, what is wanted in place of a tensor of all experts; empty where `stack` is none."""
    rivals = wanted[stack].rivals if stack in wanted else ()
    return {shard: name for name in rivals if name in wanted and isinstance(shard := wanted[name].shard, tuple)}


def _checkpoint_name(name: str, model: nn.Module) -> str:
    """A parameter's name with its modules as the checkpoint calls them."""
    renamed: Mapping[str, str] = getattr(model, "checkpoint_modules", {})
    return ".".join(renamed.get(part, part) for part in name.split("."))


def _fill(target: _Target, tensor: torch.Tensor, name: str, file: Path) -> None:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(
            f"{name} in {file} is {tensor.dtype}, but config.json names no quantisation of it; use a checkpoint whose "
            "quantization_config says how its weights are stored"
        )
    try:
        weight_loader_of(target.parameter)(target.parameter, tensor, target.shard)
    except WeightShapeError as error:
        raise CheckpointError(f"{name} in {file} has {error} by config.json") from error


def _prediction_layers(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that predict further tokens: of layers past the last one, or modules beside."""
    first, count = config.num_hidden_layers, config.fields.integer("num_nextn_predict_layers", 0, minimum=0)
    past = (f"model.layers.{layer}." for layer in range(first, first + count))
    return (*past, *ARCHITECTURES[config.architecture].facts.mtp_prefixes)


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry beside the weights: computed ones, and a copy of the tied embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
