"""`QuantizationConfig` and `LayerQuantConfig`: how a checkpoint's weights are quantised, and the methods' registry.

A method is a function from the checkpoint's quantization_config to a `QuantizationConfig`; what it says of the stored
tensors is read by a layout of `models.quantization.layouts`. Imports no torch.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, TypeAlias

from models.config.fields import Fields
from models.registry import Registry

MXFP4_GROUP = 32
"""Inputs that share a power-of-two scale (OCP microscaling formats 1.0)."""
NVFP4_GROUP = 16
"""Inputs that share an FP8 scale in NVIDIA's 4-bit format."""

WeightBits: TypeAlias = Literal[4, 8, 16]
"""Bits per value of a weight; 16 is bfloat16."""
Rounding: TypeAlias = Literal["int8", "int4", "mxfp4"]
"""A value of the option `quantization` by which the loader rounds dense weights, on a CPU."""
ROUNDINGS: Mapping[Rounding, WeightBits] = MappingProxyType({"int8": 8, "int4": 4, "mxfp4": 4})
"""Bits of the values of linear layers and experts, by rounding."""


ROUNDING_FIELD = "kaon_rounding"
"""Field of config.json, outside of the quantisation that other engines read."""


class Granularity(Enum):
    """The set of values that share one scale."""

    TENSOR = "per_tensor"
    CHANNEL = "per_channel"
    """An output feature."""
    BLOCK = "per_block"
    """A rectangle of output and input features."""
    GROUP = "per_group"
    """Consecutive input features of one output feature."""


@dataclass(frozen=True, slots=True)
class LayerQuantConfig:
    """How one module's weight is quantised."""

    storage: str
    """A name of `models.quantization.layouts.STORAGE`."""
    quant_dtype: str
    """`fp8`, `int8`, `int4`, `mxfp4` or `nvfp4`."""
    quant_type: Granularity
    bits: int
    group_size: int | None = None
    """Number of inputs per group with a common scale; None for all inputs."""
    block_shape: tuple[int, int] | None = None
    """Output and input features of a block that shares a scale."""
    symmetric: bool = True
    """Whether the scales have no zero points."""
    has_group_index: bool = False
    """Whether the checkpoint lists each input's group, because groups are not contiguous."""
    zero_offset: int = 0
    """The offset that is added to a stored zero point."""
    rounds_inputs: bool = False
    """Whether the checkpoint was made for activations that are quantised to the same number of bits."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a whole checkpoint is quantised: which modules, and how each."""

    quant_method: str
    """The checkpoint's own name of the method."""
    global_quant_config: LayerQuantConfig | None
    """The quantisation of linear layers that are neither named below nor excluded; None if they are dense."""
    layer_quant_config: tuple[tuple[str, LayerQuantConfig | None], ...] = ()
    """Exceptions by pattern of module names; the first match counts. None for dense modules."""
    exclude_layers: tuple[str, ...] = ()
    """Patterns of the names of dense modules."""
    rounding: Rounding | None = None
    """The rounding that `kaon quantize` wrote, by which the CPU's operators serve the checkpoint; None: another tool
    wrote it, or products read it as it is stored."""
    _excluded: "_Patterns" = field(init=False, repr=False, compare=False)
    _named: "_Patterns" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_excluded", _Patterns(self.exclude_layers))
        object.__setattr__(self, "_named", _Patterns([pattern for pattern, _ in self.layer_quant_config]))

    def for_layer(self, module: str) -> LayerQuantConfig | None:
        """The quantisation of the checkpoint's module with this name; None if it is dense."""
        if self._excluded.first(module) is not None:
            return None
        named = self._named.first(module)
        return self.global_quant_config if named is None else self.layer_quant_config[named][1]


class _Patterns:
    """Patterns of module names. Checkpoints have hundreds of them, and tens of thousands of modules.

    `re:` begins a regular expression that matches at the start of the name. A `*` makes a shell pattern, which matches
    the whole name or a module that contains it. Any other pattern is a run of the name's dotted parts, such as
    `lm_head` or `mlp.gate`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._runs: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for index, pattern in enumerate(patterns):
            if pattern.startswith("re:"):
                self._expressions.append((index, re.compile(pattern.removeprefix("re:"))))
            elif "*" in pattern:
                whole, around = (fnmatch.translate(shell) for shell in (pattern, f"{pattern}.*"))
                self._expressions.append((index, re.compile(f"{whole}|{around}")))
            else:
                self._runs.setdefault(pattern, index)

    def first(self, module: str) -> int | None:
        """The index of the first pattern that matches this module."""
        parts = module.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        found = [self._runs[run] for run in runs if run in self._runs]
        found += [index for index, expression in self._expressions if expression.match(module)]
        return min(found, default=None)


Method: TypeAlias = Callable[[Fields, str], QuantizationConfig]
"""Called with the checkpoint's quantization_config and the method's name. Raises `CheckpointError` naming the
field."""
METHODS: Registry[Method] = Registry(
    "quantization method",
    dict.fromkeys(
        ("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "quark", "awq", "gptq", "modelopt"),
        "models.quantization.methods",
    ),
)
