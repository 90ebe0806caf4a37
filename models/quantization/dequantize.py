"""`Dequantizer`: the loader's stage that combines a quantised checkpoint's tensors into weights.

It collects the parts of each weight (codes, scales, zero points), and yields the weight, dense or quantised, under its
dense name as soon as all parts were read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from models.errors import CheckpointError
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig
from models.quantization.layouts import StorageLayout, layout_of
from models.quantization.stored import QuantizedRows

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Ends of the names of a stack's scales; the rest is the name of the stack itself."""

ExpertNames = Mapping[tuple[int, str], str]
"""Maps (expert, part) to the weight's name in checkpoints without stacks, in the order of the stack."""

_EXPERT_PARTS = ("_blocks", "_scales")
_ATTENTION_PARTS = (".attn", ".mla_attn", ".k_proj", ".v_proj", ".qkv_proj", ".kv_a_proj_with_mqa", ".kv_b_proj")
"""Submodules of an attention layer under which checkpoints store the scales of its KV cache."""
_UNUSED_PARTS = frozenset(
    {
        "activation_scale",
        "input_global_scale",
        "input_scale",
        "input_scale_ub",
        "input_zero_point",
        "input_g_idx",
        "output_scale",
        "output_zero_point",
        "q_scale",
        "prob_output_scale",
    }
)
"""Tensors for quantised activations, which are not loaded: activations are not quantised by stored scales here."""


class KVScales(NamedTuple):
    """The scales of a layer's keys and values in an 8-bit KV cache."""

    k: float = 1.0
    v: float = 1.0
    names: tuple[str, ...] = ()
    """The names of the tensors that hold the scales."""


@dataclass(slots=True)
class _PartialWeight:
    """The parts of one weight that were read so far."""

    layout: StorageLayout
    result: str
    names: dict[str, str] = field(default_factory=dict)
    """The checkpoint name of each part."""
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    mapped: set[str] = field(default_factory=set)
    """Parts that are still memory-mapped from their file."""


class Dequantizer:
    """Collects the parts of each quantised weight from all files, and yields the weight once it is complete.

    Dense tensors are passed on even if the configuration declares their module quantised: checkpoints list their
    exclusions incompletely, and norms and embeddings are never quantised.
    """

    def __init__(
        self,
        config: QuantizationConfig | None,
        dtype: torch.dtype,
        is_wanted: Callable[[str], bool],
        expert_names: Callable[[str], ExpertNames] = lambda _name: {},
        stays: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        """`is_wanted`: whether the model still lacks the dense tensor of a name. `stays`: whether the tensor of a name
        may stay quantised. `expert_names`: the single experts' names for the name of a stack; empty for other tensors.
        """
        self._config = config
        self._expert_names = expert_names
        self._dtype = dtype
        self._is_wanted = is_wanted
        self._stays = stays
        self._gathered: dict[str, _PartialWeight] = {}
        self._layouts: dict[str, StorageLayout | None] = {}
        self.made_dense: Counter[str] = Counter()
        """Number of weights that were made dense, by a description of their form and the reason."""
        self.kv_scales: dict[str, KVScales] = {}
        """The KV cache scales in the checkpoint, by attention layer (`model.layers.N.self_attn`)."""

    def dense(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the dense tensors of one file, and the weights whose last part is in this file.

        Raises `CheckpointError` if a weight's parts do not fit one another.
        """
        if self._config is None:
            yield from tensors
            return
        for name, tensor in tensors:
            for each, part in self._by_expert(name, tensor):
                yield from self._feed(each, part)
        self._end_file()

    def missing_names(self, missing: Iterable[str]) -> list[str]:
        """Return the checkpoint names of the parts that are missing for these dense tensors."""
        incomplete = {gathered.result: (module, gathered) for module, gathered in self._gathered.items()}
        names = []
        for name in missing:
            if name in incomplete:
                module, gathered = incomplete[name]
                absent = gathered.layout.required_parts - gathered.parts.keys()
                names += [f"{module}{gathered.layout.joint}{part}" for part in absent]
            else:
                names.append(name)
        return names

    def incomplete(self) -> list[str]:
        """Return the names of wanted weights of which only some parts were read."""
        return [gathered.result for gathered in self._gathered.values() if self._is_wanted(gathered.result)]

    def unexpected_names(self) -> list[str]:
        """Return the names of tensors that belong to weights which were not wanted, or complete without them."""
        return [
            name
            for gathered in self._gathered.values()
            if not self._is_wanted(gathered.result)
            for name in gathered.names.values()
        ]

    def _by_expert(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensor, or its parts if it is a stack of experts' 8-bit weights or of their scales."""
        ending = next((each for each in _SCALE_SUFFIXES if name.endswith(each)), "")
        is_part = ending or tensor.dtype.itemsize == 1
        names = self._expert_names(name.removesuffix(ending)) if is_part else {}
        if not names:
            yield name, tensor
            return
        of_stack = self._layout(_split(name)[0])
        for alone, part in unstacked(name, tensor, names):
            # The configuration names the module that the checkpoint has, which is the stack.
            self._layouts.setdefault(_split(alone)[0], of_stack)
            yield f"{alone}{ending}", part

    def _feed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensor if it is dense, or the weight that it completes, or nothing."""
        if self._is_kv_scale(name, tensor):
            return
        module, part = _split(name)
        layout = self._layout(module)
        if layout is None or _is_stacked(name) != (layout.joint == "_"):
            yield name, tensor
            return
        layer, part = layout.layer, _canonical(part, layout.layer)
        if part in _UNUSED_PARTS or _is_redundant(name, part, layer, tensor, is_wanted=self._is_wanted(name)):
            return
        result = module if layout.joint == "_" else f"{module}.weight"
        is_dense = part == "weight" and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        needed = layout.required_parts
        if is_dense or part not in needed or not self._is_wanted(result):
            yield name, tensor
            return
        gathered = self._gathered.setdefault(module, _PartialWeight(layout, result))
        gathered.names[part], gathered.parts[part] = name, tensor
        gathered.mapped.add(part)
        if needed <= gathered.parts.keys():
            del self._gathered[module]
            yield result, self._weight(module, gathered)

    def _weight(self, module: str, gathered: _PartialWeight) -> torch.Tensor:
        """Return the quantised weight if it may stay quantised and kernels support its form, else the dense weight."""
        layout, parts = gathered.layout, gathered.parts
        dense = partial(layout.dequantize, module, parts, self._dtype)
        stays = self._stays(gathered.result)
        if stays:
            stack = layout.stack(parts, self._dtype)
            if stack is not None:
                return stack
            codes = layout.codes(parts, dense)
            if codes is not None:
                return QuantizedRows.of(codes, self._dtype)
        is_read_otherwise = layout.has_kernel and not stays
        reason = "the layer reads their numbers" if is_read_otherwise else "no kernel multiplies them"
        self.made_dense[f"{_words(layout.layer)}, {reason}"] += 1
        return dense()

    def _end_file(self) -> None:
        """Copy the parts of incomplete weights, because a memory-mapped tensor would keep its whole file mapped."""
        for gathered in self._gathered.values():
            for part in gathered.mapped:
                gathered.parts[part] = gathered.parts[part].clone()
            gathered.mapped.clear()

    def _layout(self, module: str) -> StorageLayout | None:
        assert self._config is not None
        if module not in self._layouts:
            layer = self._config.for_layer(module)
            self._layouts[module] = None if layer is None else layout_of(layer)
        return self._layouts[module]

    def _is_kv_scale(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a scale of a layer's KV cache; if so, its value is recorded in `kv_scales`.

        Quark stores the scale as `output_scale` of the key and value projections.
        """
        module, _, leaf = name.rpartition(".")
        projection = module.rpartition(".")[2]
        side = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv"}.get(leaf, "")
        if leaf == "output_scale" and projection in ("k_proj", "v_proj"):
            side = projection[0]
        if not side or tensor.numel() != 1:
            return False
        for suffix in _ATTENTION_PARTS:
            module = module.removesuffix(suffix)
        scales = self.kv_scales.get(module, KVScales())
        # A scale that was not calibrated is stored as -1 or 0.
        value = float(tensor) if tensor > 0 else 1.0
        self.kv_scales[module] = KVScales(
            value if "k" in side else scales.k, value if "v" in side else scales.v, (*scales.names, name)
        )
        return True


def _words(layer: LayerQuantConfig) -> str:
    """Describe a form of quantised weights in words."""
    is_grouped = layer.quant_type is Granularity.GROUP and layer.group_size is not None
    scales = f"groups of {layer.group_size}" if is_grouped else f"scales {layer.quant_type.value.replace('_', ' ')}"
    order = " in the order of activations" if layer.has_group_index else ""
    zeros = "" if layer.symmetric else " with zero points"
    return f"{layer.quant_dtype} with {scales}{order}{zeros}"


def _is_stacked(name: str) -> bool:
    return name.endswith(_EXPERT_PARTS)


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into module and part."""
    if _is_stacked(name):
        module, _, part = name.rpartition("_")
    else:
        module, _, part = name.rpartition(".")
    return module, part


def _canonical(part: str, layer: LayerQuantConfig) -> str:
    """Map a part's name to one that is the same for all formats."""
    if part == "weight_scale_inv":
        return "weight_scale"
    if part.endswith("_activation_scale"):
        return "activation_scale"
    if part == "weight_packed" and layer.storage in ("mxfp4", "nvfp4"):
        return "weight"
    return part


def _is_redundant(name: str, part: str, layer: LayerQuantConfig, tensor: torch.Tensor, *, is_wanted: bool) -> bool:
    """Whether a tensor can be skipped: a `g_idx` of adjacent groups, zero points of symmetric weights, or a zero bias.

    Raises `CheckpointError` for a `g_idx` that contradicts the configuration.
    """
    if part in ("g_idx", "weight_g_idx") and not layer.has_group_index:
        _require_adjacent_groups(name, tensor, layer.group_size)
        return True
    if part == "weight_zero_point":
        return layer.symmetric
    return part == "bias" and not is_wanted and layer.storage == "gptq" and not tensor.any()


def _require_adjacent_groups(name: str, listed: torch.Tensor, group_size: int | None) -> None:
    """Raise `CheckpointError` unless the groups in `listed` consist of adjacent inputs. # [I]"""
    inputs = torch.arange(listed.numel())
    is_unset = bool((listed < 0).any())
    if not is_unset and not torch.equal(listed.flatten().long(), inputs // (group_size or max(1, len(inputs)))):
        raise CheckpointError(f"{name} orders inputs by activation, but the quantisation in config.json does not")


def unstacked(name: str, stack: torch.Tensor, names: ExpertNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a stack of all experts' weights, or of their scales, into one tensor for each part of an expert.

    transformers saves FP8 models with such stacks, some with separate weights (`experts.3.gate_proj.weight`) but
    stacked scales (`experts.gate_up_proj_scale_inv`).

    # [experts, parts * n, m] -> experts * parts of [n, m], with the names of the weights

    Raises `CheckpointError` if the stack cannot be split evenly, because two parts share a row of scale blocks.
    """
    num_parts = len({part for _, part in names})
    num_experts = len(names) // num_parts
    if stack.ndim != 3 or len(stack) != num_experts or stack.shape[1] % num_parts:
        raise CheckpointError(
            f"{name} has shape {list(stack.shape)}, where the model needs {num_experts} experts, each with rows for "
            f"{num_parts} equal part{'s' if num_parts > 1 else ''}"
        )
    rows = stack.shape[1] // num_parts
    for index, alone in enumerate(names.values()):
        expert, part = divmod(index, num_parts)
        yield alone, stack[expert, part * rows : (part + 1) * rows]
