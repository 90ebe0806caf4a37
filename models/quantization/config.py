"""`QuantizationConfig` and `LayerQuantConfig`: how a checkpoint's weights are quantised, in one vocabulary.

Made by the parsers in `formats`, one a format; read by the loader's dequantising stage. Needs no torch.
"""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Storage(Enum):
    """Which tensors of a checkpoint hold one quantised weight, and how they are packed."""

    SCALED = "one weight a number beside its scales"
    MXFP4 = "two weights a byte beside a power of two for each 32 inputs"
    MXFP4_EXPERTS = "all experts' weights as blocks of 32 inputs beside their powers of two"
    PACKED = "rows of weights packed into words, as compressed-tensors does"
    AWQ = "columns of weights packed into words in AWQ's order"
    GPTQ = "rows of inputs packed into words, as GPTQ does"


class Granularity(Enum):
    """What shares one scale."""

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

    storage: Storage
    quant_dtype: str
    """`fp8`, `int8`, `int4` or `mxfp4`."""
    quant_type: Granularity
    bits: int
    group_size: int | None = None
    """Inputs that share a scale where it is per group; None: all of them."""
    block_shape: tuple[int, int] | None = None
    """Output and input features of a block where the scale is per block."""
    symmetric: bool = True
    """Whether there are no zero points beside the scales."""
    has_group_index: bool = False
    """Whether the checkpoint lists each input's group, because groups are not runs of neighbours."""
    zero_offset: int = 0
    """Added to a stored zero point."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a whole checkpoint is quantised: which modules, and how each."""

    quant_method: str
    """The checkpoint's own name of the method."""
    global_quant_config: LayerQuantConfig | None
    """Of each linear layer that is named neither below nor excluded; None: those are dense."""
    layer_quant_config: tuple[tuple[str, LayerQuantConfig | None], ...] = ()
    """By pattern of module names, before the global one; the first that matches counts. None: dense."""
    exclude_layers: tuple[str, ...] = ()
    """Patterns of module names that are dense."""
    _excluded: "_Patterns" = field(init=False, repr=False, compare=False)
    _named: "_Patterns" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_excluded", _Patterns(self.exclude_layers))
        object.__setattr__(self, "_named", _Patterns([pattern for pattern, _ in self.layer_quant_config]))

    def for_layer(self, module: str) -> LayerQuantConfig | None:
        """How the module of that name in the checkpoint is quantised, None where it is dense."""
        if self._excluded.first(module) is not None:
            return None
        named = self._named.first(module)
        return self.global_quant_config if named is None else self.layer_quant_config[named][1]


class _Patterns:
    """A list of patterns, of which checkpoints have hundreds, for tens of thousands of modules.

    `re:` begins a regular expression over the start of the name, and `*` makes a shell pattern of the whole name or
    of a module around it. Any other pattern is a run of the name's dotted parts, such as `lm_head` or `mlp.gate`.
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
        """The place of the first pattern that means this module."""
        parts = module.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        found = [self._runs[run] for run in runs if run in self._runs]
        found += [index for index, expression in self._expressions if expression.match(module)]
        return min(found, default=None)
