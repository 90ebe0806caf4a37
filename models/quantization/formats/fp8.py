"""Parser of `fp8` (DeepSeek's and transformers' finegrained blocks, or one scale a tensor) and of `fbgemm_fp8`."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage
from models.quantization.formats.common import pair


def parse(section: Fields, method: str) -> QuantizationConfig:
    """`weight_block_size` makes a scale a block; without it a scale's own shape tells a tensor's from a channel's."""
    if section.string("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.invalid("fmt", '"e4m3"')
    if section.string("expert_dtype", "fp8") != "fp8":
        raise section.invalid("expert_dtype", '"fp8"')
    if not section.has("weight_block_size"):
        layer = LayerQuantConfig(Storage.SCALED, "fp8", Granularity.TENSOR, 8)
    else:
        layer = LayerQuantConfig(
            Storage.SCALED, "fp8", Granularity.BLOCK, 8, block_shape=pair(section, "weight_block_size")
        )
    exclude = section.strings("modules_to_not_convert") + section.strings("ignored_layers")
    return QuantizationConfig(method, layer, exclude_layers=exclude)


def parse_fbgemm(section: Fields, method: str) -> QuantizationConfig:
    """One scale an output feature."""
    layer = LayerQuantConfig(Storage.SCALED, "fp8", Granularity.CHANNEL, 8)
    return QuantizationConfig(method, layer, exclude_layers=section.strings("modules_to_not_convert"))
