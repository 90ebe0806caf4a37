"""`parse_quantization`: parses a checkpoint's quantisation configuration into a `QuantizationConfig`.

Each method has one parser, registered by the value of `quant_method`. Imports no torch.
"""

import dataclasses
import re
from pathlib import Path
from typing import cast

from models.config.fields import Fields
from models.errors import CheckpointError
from models.quantization.config import (
    METHODS,
    MXFP4_GROUP,
    NVFP4_GROUP,
    ROUNDING_FIELD,
    ROUNDINGS,
    Granularity,
    LayerQuantConfig,
    QuantizationConfig,
    Rounding,
)

_SECTIONS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"


def parse_quantization(config: Fields, directory: Path | None = None) -> QuantizationConfig | None:
    """Parse the quantisation in config.json, or else in ModelOpt's file in `directory`; None if neither has one.

    Raises `CheckpointError` naming the field and its value for a scheme that is not supported.
    """
    for name in _SECTIONS:
        section = config.section(name)
        if section is not None:
            found = _parse(section, "compressed-tensors" if name == "compression_config" else "")
            return dataclasses.replace(found, rounding=_rounding(config))
    if directory is not None and (directory / MODELOPT_FILE).is_file():
        return _parse(Fields.from_file(directory / MODELOPT_FILE), "modelopt")
    return None


def _rounding(config: Fields) -> Rounding | None:
    if not config.has(ROUNDING_FIELD):
        return None
    name = config.string(ROUNDING_FIELD, "")
    if name not in ROUNDINGS:
        raise config.invalid(ROUNDING_FIELD, f"one of {', '.join(ROUNDINGS)}")
    return cast(Rounding, name)


def _parse(section: Fields, default: str) -> QuantizationConfig:
    method = section.string("quant_method", default).replace("_", "-").lower()
    for name in METHODS:
        if method == name.replace("_", "-"):
            try:
                return METHODS[name](section, name)
            except re.error as error:
                raise scheme_error(
                    section, f"names modules by {error.pattern!r}, which is not a regular expression: {error}"
                ) from error
    raise section.invalid("quant_method", f"one of {', '.join(METHODS)}")


def group_size(section: Fields, name: str) -> int | None:
    """Read the number of inputs that share a scale, or None if the field is -1, which means all inputs."""
    if section.values.get(name) == -1:
        return None
    return section.integer(name)


def pair(section: Fields, name: str) -> tuple[int, int]:
    """Read a field that is a list of two positive integers."""
    found = section.values.get(name)
    if not isinstance(found, list) or len(found) != 2 or not all(type(item) is int and item > 0 for item in found):
        raise section.invalid(name, "a list of 2 integers above 0")
    return found[0], found[1]


def scheme_error(section: Fields, text: str) -> CheckpointError:
    """Make the error for an unsupported part of the configuration; `text` is the predicate."""
    return CheckpointError(f"{section.where} {text}")


@METHODS.register("fp8")
@METHODS.register("mxfp8")
def parse_fp8(section: Fields, method: str) -> QuantizationConfig:
    """DeepSeek's and transformers' FP8: a scale per block of `weight_block_size`, else per tensor or per channel.

    The shape of a scale distinguishes the last two. MiniMax's method name `mxfp8` means power-of-two scales for each
    32 inputs. DeepSeek-V4's routed experts are FP4 (`expert_dtype`), with a power-of-two scale for each 32 inputs.
    """
    if section.string("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.invalid("fmt", '"e4m3"')
    experts = section.string("expert_dtype", "fp8")
    if experts not in ("fp8", "fp4"):
        raise section.invalid("expert_dtype", '"fp8" or "fp4"')
    if not section.has("weight_block_size"):
        layer = LayerQuantConfig("scaled", "fp8", Granularity.TENSOR, 8)
    else:
        layer = LayerQuantConfig("scaled", "fp8", Granularity.BLOCK, 8, block_shape=pair(section, "weight_block_size"))
    exclude = section.strings("modules_to_not_convert") + section.strings("ignored_layers")
    fp4 = LayerQuantConfig("mxfp4", "mxfp4", Granularity.GROUP, 4, group_size=MXFP4_GROUP)
    own = (("*.experts.*", fp4),) if experts == "fp4" else ()
    return QuantizationConfig(method, layer, own, exclude_layers=exclude)


@METHODS.register("fbgemm_fp8")
def parse_fbgemm(section: Fields, method: str) -> QuantizationConfig:
    """FBGEMM's FP8: one scale per output feature."""
    layer = LayerQuantConfig("scaled", "fp8", Granularity.CHANNEL, 8)
    return QuantizationConfig(method, layer, exclude_layers=section.strings("modules_to_not_convert"))


@METHODS.register("mxfp4")
def parse_mxfp4(section: Fields, method: str) -> QuantizationConfig:
    """gpt-oss's MXFP4: only experts are quantised, and all experts of a layer are one tensor. The only option is the
    list of excluded modules."""
    layer = LayerQuantConfig("mxfp4-experts", "mxfp4", Granularity.GROUP, 4, group_size=MXFP4_GROUP)
    return QuantizationConfig(method, layer, exclude_layers=section.strings("modules_to_not_convert"))


_STORAGES = {
    "float-quantized": ("scaled", "float"),
    "int-quantized": ("scaled", "int"),
    "naive-quantized": ("scaled", None),
    "pack-quantized": ("packed", "int"),
    "mxfp4-pack-quantized": ("mxfp4", "float"),
    "mxfp8-quantized": ("scaled", "float"),
    "nvfp4-pack-quantized": ("nvfp4", "float"),
}
"""The layout of each format, and the number type that it requires; None if both are allowed."""
_FP4_GROUPS = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}
_GRANULARITIES = {
    "tensor": Granularity.TENSOR,
    "channel": Granularity.CHANNEL,
    "block": Granularity.BLOCK,
    "group": Granularity.GROUP,
    "tensor_group": Granularity.GROUP,
}
_EVERY_LINEAR = ("Linear", "FusedMoELinear")
"""Class names that are accepted as targets; other targets with an initial capital letter are rejected."""


@METHODS.register("compressed-tensors")
def parse_compressed_tensors(section: Fields, method: str) -> QuantizationConfig:
    """llm-compressor's format: groups of target modules, each with a number type and a granularity.

    Targets are module names, regular expressions, or `Linear` for all modules that no other group names.
    """
    sparsity, transform = section.section("sparsity_config"), section.section("transform_config")
    if sparsity is not None and sparsity.string("format", "dense") != "dense":
        raise sparsity.invalid("format", '"dense"')
    if transform is not None and transform.values:
        raise section.invalid("transform_config", "left out: transformed weights do not run here")
    groups = section.section("config_groups")
    if not section.has("kv_cache_scheme") and (groups is None or not groups.values):
        raise section.invalid("config_groups", "an object of quantisation groups")
    everywhere: LayerQuantConfig | None = None
    special: list[tuple[str, LayerQuantConfig | None]] = []
    groups = groups or Fields({}, section.where)
    for name in groups.values:
        group = groups.section(name) or Fields({}, groups.where)
        weights = group.section("weights")
        if weights is None:
            continue
        layer = _compressed_layer(group.string("format", section.string("format", "unnamed")), group, weights)
        for target in group.strings("targets"):
            if target in _EVERY_LINEAR:
                everywhere = layer
            elif target[:1].isupper():
                raise group.invalid("targets", f"module names, regular expressions, or {_EVERY_LINEAR[0]}")
            else:
                special.append((target, layer))
    # Module names take precedence over regular expressions.
    special.sort(key=lambda entry: entry[0].startswith("re:"))
    return QuantizationConfig(method, everywhere, tuple(special), exclude_layers=section.strings("ignore"))


def _compressed_layer(storage_format: str, group: Fields, weights: Fields) -> LayerQuantConfig:
    if storage_format not in _STORAGES:
        raise scheme_error(group, f"has the format {storage_format!r}; it must be one of {', '.join(_STORAGES)}")
    storage, wanted = _STORAGES[storage_format]
    kind, bits = weights.string("type", "int"), weights.integer("num_bits", 8)
    allowed = {"scaled": (8,), "packed": (4, 8)}.get(storage, (4,))
    if kind not in ("int", "float") or (wanted is not None and kind != wanted):
        raise weights.invalid("type", f'"{wanted or "int"}" in the format {storage_format}')
    if bits not in allowed:
        raise weights.invalid("num_bits", f"{' or '.join(map(str, allowed))} in the format {storage_format}")
    grouped = {None: "tensor", -1: "channel"}.get(weights.values.get("group_size"), "group")
    strategy = weights.string("strategy", grouped)
    if strategy not in _GRANULARITIES:
        raise weights.invalid("strategy", f"one of {', '.join(_GRANULARITIES)}")
    granularity = _GRANULARITIES[strategy]
    size = _FP4_GROUPS.get(storage)
    if size is not None and (granularity, weights.values.get("group_size")) != (Granularity.GROUP, size):
        raise weights.invalid("group_size", f"{size}, with a strategy of groups, in the format {storage_format}")
    return LayerQuantConfig(
        storage,
        storage if size is not None else "fp8" if kind == "float" else f"int{bits}",
        granularity,
        bits,
        group_size=group_size(weights, "group_size") if granularity is Granularity.GROUP else None,
        block_shape=_block_shape(weights) if granularity is Granularity.BLOCK else None,
        symmetric=weights.boolean("symmetric", True),
        # "weight" and "static" affect only the order of quantisation; groups still consist of adjacent inputs.
        has_group_index=weights.values.get("actorder") in ("group", "dynamic", True),
        rounds_inputs=group.section("input_activations") is not None,
    )


def _block_shape(weights: Fields) -> tuple[int, int]:
    """Read `block_structure`: a list of two integers, or text such as `128x128` in older checkpoints."""
    written = weights.values.get("block_structure")
    if isinstance(written, str):
        rows, _, columns = written.partition("x")
        if rows.isdigit() and columns.isdigit() and int(rows) and int(columns):
            return int(rows), int(columns)
    return pair(weights, "block_structure")


_FP8_GRANULARITIES = {"per_tensor": Granularity.TENSOR, "per_channel": Granularity.CHANNEL}


@METHODS.register("quark")
def parse_quark(section: Fields, method: str) -> QuantizationConfig:
    """AMD Quark's MXFP4 and FP8. `layer_quant_config`, by shell patterns of module names, overrides
    `global_quant_config`."""
    by_type = section.section("layer_type_quant_config")
    if by_type is not None and by_type.values:
        raise section.invalid("layer_type_quant_config", "empty: layers are distinguished by name only")
    special: list[tuple[str, LayerQuantConfig | None]] = []
    layers = section.section("layer_quant_config") or Fields({}, section.where)
    for pattern in layers.values:
        special.append((pattern, _quark_layer(layers.section(pattern))))
    return QuantizationConfig(
        method,
        _quark_layer(section.section("global_quant_config")),
        tuple(special),
        exclude_layers=section.strings("exclude"),
    )


def _quark_layer(section: Fields | None) -> LayerQuantConfig | None:
    weight = None if section is None else section.section("weight")
    if weight is None:
        return None
    dtype, scheme = weight.string("dtype", "unnamed"), weight.string("qscheme", "unnamed")
    if dtype == "fp4":
        if scheme != "per_group":
            raise weight.invalid("qscheme", '"per_group" for fp4')
        if weight.integer("group_size") != MXFP4_GROUP:
            raise weight.invalid("group_size", f"{MXFP4_GROUP} for fp4")
        if weight.string("scale_format", "e8m0") != "e8m0":
            raise weight.invalid("scale_format", '"e8m0" for fp4')
        return LayerQuantConfig("mxfp4", "mxfp4", Granularity.GROUP, 4, group_size=MXFP4_GROUP)
    if dtype != "fp8_e4m3":
        raise weight.invalid("dtype", '"fp4" or "fp8_e4m3"')
    if scheme not in _FP8_GRANULARITIES:
        raise weight.invalid("qscheme", f"one of {', '.join(_FP8_GRANULARITIES)} for fp8_e4m3")
    return LayerQuantConfig("scaled", "fp8", _FP8_GRANULARITIES[scheme], 8)


@METHODS.register("awq")
def parse_awq(section: Fields, method: str) -> QuantizationConfig:
    """AWQ: 4-bit codes in groups with zero points, in the packing of AutoAWQ's `gemm` version.

    Older checkpoints call the fields `w_bit` and `q_group_size`.
    """
    bits_field = "bits" if section.has("bits") else "w_bit"
    if section.integer(bits_field, 4) != 4:
        raise section.invalid(bits_field, "4")
    if section.string("version", "gemm").lower() != "gemm":
        raise section.invalid("version", '"gemm"')
    if not section.boolean("zero_point", True):
        raise section.invalid("zero_point", "true")
    layer = LayerQuantConfig(
        "awq",
        "int4",
        Granularity.GROUP,
        4,
        group_size=group_size(section, "q_group_size" if section.has("q_group_size") else "group_size"),
        symmetric=False,
    )
    return QuantizationConfig(method, layer, exclude_layers=section.strings("modules_to_not_convert"))


@METHODS.register("gptq")
def parse_gptq(section: Fields, method: str) -> QuantizationConfig:
    """GPTQ of AutoGPTQ and GPTQModel: 4- or 8-bit codes in groups of adjacent inputs or in activation order.

    GPTQModel's `dynamic` has exceptions by regular expression: with prefix `-:` modules are dense; others override
    fields.
    """
    checkpoint_format = section.string("checkpoint_format", "gptq")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise section.invalid("checkpoint_format", '"gptq" or "gptq_v2"')
    if section.boolean("is_marlin_format", False):
        raise section.invalid("is_marlin_format", "false")
    # The format `gptq` stores each zero point minus one.
    zero_offset = 1 if checkpoint_format == "gptq" else 0
    exclude = list(section.strings("modules_to_not_convert"))
    special: list[tuple[str, LayerQuantConfig | None]] = []
    dynamic = section.section("dynamic") or Fields({}, section.where)
    for pattern in dynamic.values:
        expression = f"re:{pattern.removeprefix('-:').removeprefix('+:')}"
        if pattern.startswith("-:"):
            exclude.append(expression)
        else:
            changed = dynamic.section(pattern) or dynamic
            special.append((expression, _gptq_layer(changed.with_defaults(section.values), zero_offset)))
    return QuantizationConfig(method, _gptq_layer(section, zero_offset), tuple(special), exclude_layers=tuple(exclude))


def _gptq_layer(section: Fields, zero_offset: int) -> LayerQuantConfig:
    bits = section.integer("bits")
    if bits not in (4, 8):
        raise section.invalid("bits", "4 or 8")
    return LayerQuantConfig(
        "gptq",
        f"int{bits}",
        Granularity.GROUP,
        bits,
        group_size=group_size(section, "group_size"),
        # Zero points are stored even if the quantisation is symmetric.
        symmetric=False,
        has_group_index=section.boolean("desc_act", False),
        zero_offset=zero_offset,
    )


@METHODS.register("modelopt")
def parse_modelopt(section: Fields, method: str) -> QuantizationConfig:
    """NVIDIA ModelOpt's FP8, MXFP8, NVFP4, or a mix by module. The fields are in the section `quantization` of its own
    file, and at the top level of `quantization_config` in config.json."""
    inner = section.section("quantization") or section
    exclude = inner.strings("exclude_modules") + inner.strings("ignore")
    if inner.string("quant_algo", "").upper() != "MIXED_PRECISION":
        return QuantizationConfig(method, _modelopt_layer(inner), exclude_layers=exclude)
    layers = inner.section("quantized_layers") or Fields({}, inner.where)
    named = tuple((name, _modelopt_layer(layers.section(name) or layers)) for name in layers.values)
    if not named:
        raise inner.invalid("quantized_layers", "an object of modules, with quant_algo MIXED_PRECISION")
    return QuantizationConfig(method, None, named, exclude_layers=exclude)


_MODELOPT_FP8 = {
    "FP8": LayerQuantConfig("scaled", "fp8", Granularity.TENSOR, 8),
    "FP8_PER_CHANNEL_PER_TOKEN": LayerQuantConfig("scaled", "fp8", Granularity.CHANNEL, 8),
    "FP8_PB_WO": LayerQuantConfig("scaled", "fp8", Granularity.BLOCK, 8, block_shape=(128, 128)),
    "MXFP8": LayerQuantConfig("scaled", "fp8", Granularity.BLOCK, 8, block_shape=(1, 32)),
}
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")
"""They differ in activations only."""


def _modelopt_layer(section: Fields) -> LayerQuantConfig:
    algorithm = section.string("quant_algo", "").upper()
    if algorithm in _MODELOPT_FP8:
        return _MODELOPT_FP8[algorithm]
    if algorithm not in _MODELOPT_NVFP4:
        raise section.invalid("quant_algo", f"one of {', '.join((*_MODELOPT_FP8, *_MODELOPT_NVFP4))}")
    if section.integer("group_size", NVFP4_GROUP) != NVFP4_GROUP:
        raise section.invalid("group_size", f"{NVFP4_GROUP} for {algorithm}")
    return LayerQuantConfig("nvfp4-modelopt", "nvfp4", Granularity.GROUP, 4, group_size=NVFP4_GROUP)
