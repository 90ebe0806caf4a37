"""Parser of `mxfp4`, as gpt-oss is published: its experts alone, all of a layer in one tensor."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage

GROUP_SIZE = 32
"""Inputs that share a power of two, by the OCP microscaling specification."""


def parse(section: Fields, method: str) -> QuantizationConfig:
    """Nothing but the exclusions is said: the format has no options."""
    layer = LayerQuantConfig(Storage.MXFP4_EXPERTS, "mxfp4", Granularity.GROUP, 4, group_size=GROUP_SIZE)
    return QuantizationConfig(method, layer, exclude_layers=section.strings("modules_to_not_convert"))
