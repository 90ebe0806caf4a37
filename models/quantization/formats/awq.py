"""Parser of `awq`: 4-bit groups with zero points, in the packing of AutoAWQ's `gemm` version."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage
from models.quantization.formats.common import group_size


def parse(section: Fields, method: str) -> QuantizationConfig:
    """Older checkpoints call the fields `w_bit` and `q_group_size`."""
    bits_field = "bits" if section.has("bits") else "w_bit"
    if section.integer(bits_field, 4) != 4:
        raise section.invalid(bits_field, "4")
    if section.string("version", "gemm").lower() != "gemm":
        raise section.invalid("version", '"gemm"')
    if not section.boolean("zero_point", True):
        raise section.invalid("zero_point", "true")
    layer = LayerQuantConfig(
        Storage.AWQ,
        "int4",
        Granularity.GROUP,
        4,
        group_size=group_size(section, "q_group_size" if section.has("q_group_size") else "group_size"),
        symmetric=False,
    )
    return QuantizationConfig(method, layer, exclude_layers=section.strings("modules_to_not_convert"))
