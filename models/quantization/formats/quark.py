"""Parser of AMD `quark`: MXFP4 and FP8 weights, by layer name, with exclusions."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage
from models.quantization.formats.mxfp4 import GROUP_SIZE

_FP8_GRANULARITIES = {"per_tensor": Granularity.TENSOR, "per_channel": Granularity.CHANNEL}


def parse(section: Fields, method: str) -> QuantizationConfig:
    """`layer_quant_config` goes by shell patterns of names, before `global_quant_config`."""
    by_type = section.section("layer_type_quant_config")
    if by_type is not None and by_type.values:
        raise section.invalid("layer_type_quant_config", "empty: layers are told apart by name only")
    special: list[tuple[str, LayerQuantConfig | None]] = []
    layers = section.section("layer_quant_config") or Fields({}, section.where)
    for pattern in layers.values:
        special.append((pattern, _layer(layers.section(pattern))))
    return QuantizationConfig(
        method,
        _layer(section.section("global_quant_config")),
        tuple(special),
        exclude_layers=section.strings("exclude"),
    )


def _layer(section: Fields | None) -> LayerQuantConfig | None:
    weight = None if section is None else section.section("weight")
    if weight is None:
        return None
    dtype, scheme = weight.string("dtype", "unnamed"), weight.string("qscheme", "unnamed")
    if dtype == "fp4":
        if scheme != "per_group":
            raise weight.invalid("qscheme", '"per_group" for fp4')
        if weight.integer("group_size") != GROUP_SIZE:
            raise weight.invalid("group_size", f"{GROUP_SIZE} for fp4")
        if weight.string("scale_format", "e8m0") != "e8m0":
            raise weight.invalid("scale_format", '"e8m0" for fp4')
        return LayerQuantConfig(Storage.MXFP4, "mxfp4", Granularity.GROUP, 4, group_size=GROUP_SIZE)
    if dtype != "fp8_e4m3":
        raise weight.invalid("dtype", '"fp4" or "fp8_e4m3"')
    if scheme not in _FP8_GRANULARITIES:
        raise weight.invalid("qscheme", f"one of {', '.join(_FP8_GRANULARITIES)} for fp8_e4m3")
    return LayerQuantConfig(Storage.SCALED, "fp8", _FP8_GRANULARITIES[scheme], 8)
