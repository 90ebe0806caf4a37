"""LoRA adapters of a loaded model, for the model runner.

`Adapter.read` reads an adapter in PEFT's format, in any thread. `attach` adds it to the model's layers between two
steps, and `detach` removes it. A `CheckpointError` names tensors of the adapter that the model does not use, and
tensors that are missing. `group_by_adapter` groups a step's tokens by adapter, and `capture_obstacle` reports why
graphs cannot capture the adapters.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from models.attention.context import LoRATokens
from models.config.fields import body_name, with_parts
from models.errors import CheckpointError
from models.layers.base import CausalLM
from models.layers.linear import ParallelLinear
from models.layers.lora import LinearLoRA, OutputPart, Span
from models.layers.mla import MLAAttention
from models.layers.moe import AdapterError, FusedMoE
from models.layers.parameter import WeightShapeError, checkpoint_name, packed_parts
from models.lora.config import LoRAConfig

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANKS = 512
"""Largest sum of LoRA ranks of a layer's adapters that graphs capture, since a captured graph multiplies by all
adapters, including those that no row uses."""

_PREFIX = "base_model.model."
_ENDINGS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_NAMED_IN_ERRORS = 5


def load_adapters(model: CausalLM, paths: Mapping[str, Path], *, dtype: torch.dtype, device: torch.device) -> None:
    """Attach the adapters of these directories to `model`, numbered from 1 in order, converted to `dtype`.

    Raises `CheckpointError` for an adapter that is damaged, belongs to another model, or is not plain LoRA.
    """
    for number, (name, path) in enumerate(paths.items(), 1):
        try:
            attach(model, number, Adapter.read(model, path), dtype=dtype, device=device)
        except CheckpointError as error:
            raise CheckpointError(f"LoRA adapter {name} cannot be served: {error}") from error


class Adapter(NamedTuple):
    """An adapter read from its files, whose modules are those of the model. Shapes are checked by `attach`."""

    config: LoRAConfig
    file: Path
    products: Mapping[str, Mapping[str, torch.Tensor]]
    """The matrices A and B of each module, in host memory."""
    names: Mapping[str, str]
    """The file's names of modules that have another name in the model. The config's patterns are of these names."""
    experts: Mapping[str, Mapping[str, torch.Tensor]]
    """The matrices A and B of stacks of experts, by the name of their layer, with `.base_layer` appended for each
    further stack of the layer."""

    @classmethod
    def read(cls, model: CausalLM, path: Path) -> Self:
        """Read the adapter directory `path` for `model`, which is not changed. Raises `CheckpointError`."""
        targets = _targets(cast(nn.Module, model))
        if not targets:
            raise CheckpointError("this model has no linear layer that takes adapters")
        config = LoRAConfig.from_adapter(path)
        file = path / WEIGHTS_FILE
        found = _products(file)
        prefix: str | None = getattr(model, "body_prefix", None)
        parts: Mapping[str, str] = getattr(model, "renamed_parts", {})
        products, names = {}, {}
        for module, halves in found.items():
            own = with_parts(parts, module)
            own = own if prefix is None else body_name(prefix, own)
            products[own] = halves
            if own != module:
                names[own] = module
        layers = _expert_layers(cast(nn.Module, model))
        experts = {name: products.pop(name) for name in list(products) if _layer_name(name) in layers}
        _require_all(products, config, targets, file, experts)
        _require_stacks(experts, config, layers, file)
        for module in products:
            # Patterns are matched here, by the thread that reads, and not between two steps.
            config.scale_of(names.get(module, module))
        return cls(config, file, products, names, experts)


def attach(model: CausalLM, number: int, adapter: Adapter, *, dtype: torch.dtype, device: torch.device) -> None:
    """Add an adapter to `model` under an unused number. If it raises `CheckpointError`, the model is unchanged."""
    targets = _targets(cast(nn.Module, model))
    try:
        for module, halves in adapter.products.items():
            layer, shard = targets[module]
            a, b = (halves[half].to(device) for half in "AB")
            name = adapter.names.get(module, module)
            scale, rank = adapter.config.scale_of(name), adapter.config.rank_of(name)
            try:
                layer.make_lora(dtype).add(number, shard, a, b, scale, rank)
            except WeightShapeError as error:
                raise CheckpointError(
                    f"{module} in {adapter.file} has a LoRA product of {error}, by its rank and config.json"
                ) from error
        layers = _expert_layers(cast(nn.Module, model))
        for name, halves in adapter.experts.items():
            experts, a, b = layers[_layer_name(name)], halves["A"], halves["B"]
            stack = experts.stack_of(a, b)
            assert stack is not None, "an adapter that was read fits the model"
            parameter = f"{_layer_name(name)}.{stack.name}"
            scale, rank = adapter.config.scale_of(parameter), adapter.config.rank_of(parameter)
            try:
                experts.add_adapter(number, stack, (a.to(device, dtype), b.to(device, dtype)), scale, rank)
            except WeightShapeError as error:
                raise CheckpointError(
                    f"{parameter} in {adapter.file} has a LoRA product of {error}, by its rank and config.json"
                ) from error
            except AdapterError as error:
                raise CheckpointError(f"{adapter.file} changes {parameter}, but {error}") from error
    except BaseException:
        detach(model, number)
        raise


def detach(model: CausalLM, number: int) -> None:
    """Remove the adapter of that number, which no running request may use."""
    for module in cast(nn.Module, model).modules():
        if isinstance(module, FusedMoE):
            module.adapters.pop(number, None)
        lora = getattr(module, "lora", None)
        if isinstance(lora, LinearLoRA):
            lora.remove(number)
            if lora.is_unused and isinstance(module, ParallelLinear):
                # A layer without `lora` may use fused operators.
                module.lora = None


class HookedLoRA:
    """Applies adapters to a linear layer of transformers' code by a forward hook."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def make_lora(self, dtype: torch.dtype) -> LinearLoRA:
        """Return the layer's adapters; on the first call, create them with weights of `dtype` and install the hook."""
        inputs, outputs = self._layer.in_features, self._layer.out_features
        present: LinearLoRA | None = getattr(self._layer, "lora", None)
        if present is not None:
            return present
        whole = OutputPart(outputs, (Span(0, outputs, 0),))
        lora = LinearLoRA(inputs, slice(0, inputs), {None: whole}, dtype)

        def add(_layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            # [1, tokens, features]
            lora.apply(output.view(-1, outputs), args[0].reshape(-1, inputs))

        self._layer.register_forward_hook(add)
        self._layer.lora = lora  # type: ignore[assignment]
        return lora


class _Target(NamedTuple):
    """The layer that contains a checkpoint module, and the module's part in that layer."""

    layer: ParallelLinear | HookedLoRA
    shard: str | int | None


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Map the checkpoint name of each linear module to its layer; a packed layer has several modules."""
    if hasattr(model, "linear_layers"):
        layers = cast("Callable[[], dict[str, nn.Linear]]", model.linear_layers)()
        return {name: _Target(HookedLoRA(layer), None) for name, layer in layers.items()}
    parts, targets = packed_parts(model), {}
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            parent, _, kind = checkpoint_name(name, model).rpartition(".")
            own: list[tuple[str, str | int | None]] = [(kind, None)]
            # A layer with the name of a packed module may also be filled by a single tensor of that name.
            packed = [each for each in parts.get(kind, ()) if each[1] in module.parts]
            for source, shard in packed or own:
                targets[f"{parent}.{source}"] = _Target(module, shard)
    return targets


_NESTED = ".base_layer"
"""PEFT's suffix of a further adapted parameter of the same module; the name does not say which parameter it is."""


def _layer_name(name: str) -> str:
    while name.endswith(_NESTED):
        name = name.removesuffix(_NESTED)
    return name


def _expert_layers(model: nn.Module) -> dict[str, FusedMoE]:
    """Map the names of each layer of experts, transformers' and the checkpoint's, to the layer."""
    layers: dict[str, FusedMoE] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            layers[name] = layers[checkpoint_name(name, model)] = module
    return layers


def _require_stacks(
    experts: Mapping[str, Mapping[str, torch.Tensor]],
    config: LoRAConfig,
    layers: Mapping[str, FusedMoE],
    file: Path,
) -> None:
    """Raise `CheckpointError` unless each pair of matrices fits a stack of experts, and none is missing."""
    found: set[tuple[FusedMoE, str]] = set()
    for name, halves in experts.items():
        layer = layers[_layer_name(name)]
        stack = layer.stack_of(halves["A"], halves["B"])
        if stack is None:
            raise CheckpointError(
                f"{name} in {file} has a product of {halves['A'].shape[-1]} inputs and {len(halves['B'])} outputs, "
                f"which no stack of experts of the model has"
            )
        found.add((layer, stack.name))
        # As for modules, patterns are matched here.
        config.scale_of(f"{_layer_name(name)}.{stack.name}")
    missing = [
        f"{name}.{stack}"
        for name, layer in layers.items()
        for stack in layer.stacks
        if config.targets_parameter(f"{name}.{stack}") and (layer, stack) not in found
    ]
    if missing:
        raise CheckpointError(f"{file} lacks {_some(missing)}; save the adapter again")


def _products(file: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Read the matrices A and B of each module from an adapter's file, by the module's name."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent} has no {file.name}; save the adapter as safetensors")
    try:
        # The file is read and not mapped, since truncating a mapped file would crash the process.
        tensors = load(file.read_bytes())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error}); download it again"
        ) from error
    products: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        if ending is None or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{file} holds {name}, which is not part of a LoRA adapter; it may hold {_PREFIX}*.lora_A.weight and "
                "lora_B.weight of linear layers"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(f"{name} in {file} is {tensor.dtype}; it must be float32, bfloat16 or float16")
        products.setdefault(name[len(_PREFIX) : -len(ending)], {})[_ENDINGS[ending]] = tensor
    return products


def _require_all(
    products: Mapping[str, Mapping[str, torch.Tensor]],
    config: LoRAConfig,
    targets: Mapping[str, _Target],
    file: Path,
    experts: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Raise `CheckpointError` unless all modules of the adapter exist in the model, and none is missing."""
    foreign = [module for module in products if module not in targets]
    if foreign:
        raise CheckpointError(
            f"{file} holds {_some(foreign)}, but the model has no such linear layer that takes adapters; it takes "
            f"them in {', '.join(sorted({name.rpartition('.')[2] for name in targets}))}"
        )
    halved = [
        f"{module}.lora_{half}"
        for module, halves in (*products.items(), *experts.items())
        for half in "AB"
        if half not in halves
    ]
    missing = [module for module in targets if module not in products and config.targets(module)]
    if halved or missing or not (products or experts):
        raise CheckpointError(f"{file} lacks {_some([*halved, *missing]) or 'every product'}; save the adapter again")


def _some(names: list[str]) -> str:
    """Join the first few names."""
    dots = ", ..." if len(names) > _NAMED_IN_ERRORS else ""
    return ", ".join(sorted(names)[:_NAMED_IN_ERRORS]) + dots


def group_by_adapter(
    adapters: npt.NDArray[np.integer], query_lens: npt.NDArray[np.integer], device: torch.device
) -> tuple[LoRATokens, ...] | None:
    """Group a step's tokens by adapter. `adapters`: each row's adapter, 0 for none; `query_lens`: its number of
    tokens.

    Returns None if no row has an adapter. Contiguous tokens are returned as a slice, so that layers access them
    without a copy. # 2 x [B]
    """
    by_token = np.repeat(adapters, query_lens)
    groups = []
    for adapter in np.unique(adapters[adapters > 0]).tolist():
        tokens = np.flatnonzero(by_token == adapter)
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 == len(tokens):
            groups.append(LoRATokens(adapter, slice(first, last + 1)))
        else:
            groups.append(LoRATokens(adapter, torch.from_numpy(tokens).to(device)))
    return tuple(groups) or None


def capture_obstacle(model: CausalLM) -> str | None:
    """Return the reason why graphs cannot capture decodes with adapters, or None if they can."""
    for module in cast(nn.Module, model).modules():
        if isinstance(module, FusedMoE) and module.adapters:
            return "an adapter changes experts, whose tokens are counted on the host"
        if isinstance(module, MLAAttention) and module.kv_b_proj.lora is not None:
            return "an adapter changes kv_b_proj, so that its rows attend twice"
        lora = getattr(module, "lora", None)
        if isinstance(lora, LinearLoRA) and lora.num_ranks > MAX_RANKS:
            return f"the adapters have {lora.num_ranks} ranks together, and a graph takes {MAX_RANKS}"
    return None
